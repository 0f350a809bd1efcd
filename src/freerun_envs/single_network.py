"""`freerun/NetworkDefence-v0`: one network of `network_defence` as a Gymnasium environment, with pictures of it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import FloatArray
from freerun_envs import network_pictures
from freerun_envs.network_actions import ACTION_HOST, ACTION_KIND, ACTION_NAMES, ACTIONS, SLEEP
from freerun_envs.network_defence import NUM_BITS, NetworkDefenceVector
from freerun_envs.network_hosts import NUM_HOSTS
from freerun_envs.network_pictures import NetworkView
from freerun_envs.network_red import IDLE, SWEEP


class NetworkDefence(gymnasium.Env[FloatArray, np.int64]):
    """One network as a Gymnasium environment: 52 bits, 145 actions, episodes truncated after `episode_steps` steps.

    The bits are, for each of the 13 hosts, the activity that Monitor has seen and the compromise that blue believes.
    A step costs 0.1 for each user or operational host and 1 for each enterprise server or operational server where red
    has admin access, 10 while the operational service is down, and 1 for a Restore.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        red_agent: str = "B_lineAgent",
        episode_steps: int = 100,
        render_mode: str | None = None,
        action_mask: bool = False,
    ):
        """With `action_mask`, the info holds the mask of the actions that can be of use (`useful_actions`)."""
        self._has_mask = action_mask
        self._vector = NetworkDefenceVector(1, red_agent, episode_steps)
        self.observation_space = spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32)
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.render_mode = render_mode
        self._red_agent, self._episode_steps = red_agent, episode_steps
        self._obs: FloatArray = np.zeros(NUM_BITS, np.float32)
        self._actions: list[int] = []
        self._scores = [0.0]
        """Actions and cumulated rewards of this episode, recorded if there is a render mode."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**63)) if seed is None else seed
        self._actions, self._scores = [], [0.0]
        self._obs = self._vector.reset([episode_seed])[0]
        return self._obs, self._info()

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        obs, _, reward, _, truncated = self._vector.step(np.array([action]))
        if self.render_mode is not None:
            self._obs = obs[0]
            self._actions.append(int(action))
            self._scores.append(self._scores[-1] + float(reward[0]))
        info = {"success": bool(self._vector.last_success[0]), **self._info()}
        return obs[0], float(reward[0]), False, bool(truncated[0]), info

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._vector.action_masks()[0]} if self._has_mask else {}

    def host_status(self) -> NDArray[np.int8]:
        """Red's true access to each host: 0 none, 1 user, 2 admin. User0 is always 2."""
        status: NDArray[np.int8] = self._vector.host_status()[0]
        return status

    def render(self) -> Any:
        return network_pictures.draw(self.view()) if self.render_mode == "rgb_array" else None

    def view(self) -> NetworkView:
        """What `render` draws. Actions and scores are recorded only if there is a render mode."""
        bits = self._obs.reshape(NUM_HOSTS, 4).astype(int).tolist()
        blue, blue_host, red, red_host = "has not acted yet", None, "has not acted yet", None
        if self._actions:
            action = self._actions[-1]
            blue = ACTION_NAMES[action] + ("" if self._vector.last_success[0] else ", which does not fit there")
            blue_host = int(ACTION_HOST[action]) if ACTION_KIND[action] != SLEEP else None
            kind, host, outcome = (int(part[0]) for part in self._vector.last_red_action)
            red = network_pictures.describe_red(kind, host, outcome)
            red_host = host if kind not in (IDLE, SWEEP) else None
        return NetworkView(
            self._red_agent,
            len(self._actions),
            self._episode_steps,
            self._scores,
            self.host_status().tolist(),
            [network_pictures.describe_alert(tuple(host)) for host in bits],
            self._vector.num_decoys()[0].tolist(),
            blue,
            blue_host,
            red,
            red_host,
            bool(self._vector.is_service_down()[0]),
        )
