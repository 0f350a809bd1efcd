"""`freerun/RoughDrone-v0` and `-v1`: one drone of `drone_sim` as a Gymnasium environment, with pictures."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import FloatArray
from freerun_envs.drone_pictures import VIEWS, FlightPicture, find_view
from freerun_envs.drone_sim import RoughDroneSim
from freerun_envs.drone_tasks import CEILING, STEP_SECONDS
from freerun_envs.terrain import Heights


class RoughDrone(gymnasium.Env[FloatArray, FloatArray]):
    """A quadrotor over rough terrain. The task is explore, hover or waypoint; `drone_sim` describes them."""

    # `views` is what `freerun eval --view` may choose: it becomes the argument `view`.
    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / STEP_SECONDS), "views": list(VIEWS)}  # noqa: RUF012

    def __init__(
        self,
        task: str = "explore",
        episode_seconds: float | None = None,
        device: str = "cpu",
        render_mode: str | None = None,
        terrain_seed: int = 0,
        version: int = 0,
        view: str = "above",
    ):
        # autoreset=False: under Gymnasium's interface the caller resets.
        self.sim = RoughDroneSim(1, device, task, 0, episode_seconds, terrain_seed, autoreset=False, version=version)
        limits = self.sim.spec.observation_space
        self.observation_space = spaces.Box(limits.low, limits.high, dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.render_mode = render_mode
        find_view(view)  # refuses a wrong one at once
        self._view = view
        # One row for the start and one for each step. It is filled if there is a render mode.
        self._positions = np.zeros((self.sim.max_episode_steps + 1, 3))
        self._picture: FlightPicture | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        obs = self.sim.reset([int(self.np_random.integers(2**63)) if seed is None else seed])
        self._picture = None
        self._record_position()
        return obs[0].cpu().numpy(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        given = torch.as_tensor(np.asarray(action, np.float32), device=self.sim.device)[None]
        obs, _, reward, terminated, truncated = self.sim.step(given)
        self._record_position()
        return obs[0].cpu().numpy(), float(reward), bool(terminated), bool(truncated), {}

    def render(self) -> Any:
        if self.render_mode != "rgb_array":
            return None
        if self._picture is None:
            self._picture = FlightPicture(self._view, self.heights(), CEILING)
        if self.sim.task == "explore":
            return self._picture.draw(self.path, self.sim.seen_cells(0).cpu().numpy(), None)
        return self._picture.draw(self.path, None, self.sim.goal[0].double().cpu().numpy())

    @property
    def path(self) -> NDArray[np.float64]:
        """The positions in this episode so far, [steps + 1, 3], if there is a render mode."""
        return self._positions[: int(self.sim.steps[0]) + 1]

    def heights(self) -> Heights:
        """The height field of this episode, for pictures."""
        heights: Heights = self.sim.terrain.heights[int(self.sim.field[0])].cpu().numpy()
        return heights

    def _record_position(self) -> None:
        if self.render_mode is not None:
            self._positions[int(self.sim.steps[0])] = self.sim.body.position[0].cpu().numpy()


RoughDroneV1 = functools.partial(RoughDrone, version=1)
"""What makes `freerun/RoughDrone-v1`."""
