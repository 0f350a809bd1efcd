"""RSL-RL's environments trained by freerun: makes a `VecEnv` a `core.TensorEnv`.

`rsl_rl_vec_env` does the opposite: it puts freerun's environments under RSL-RL's own runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from freerun.adapters.step_log import StepLog
from freerun.core import EnvSpec, Metrics, TensorStep, UserError, import_callable

PREFIX = "rsl-rl:"
NEEDED_ATTRIBUTES = ("num_envs", "num_actions", "device", "get_observations", "step")


def make(
    name: str,
    num_envs: int | None,
    device: str,
    seed: int,
    clip_actions: float | None = None,
    obs_groups: str = "policy",
    **env_args: Any,
) -> RslRlEnv:
    """The environment of rsl-rl:module:callable, which is called with num_envs, device, seed and the --env-args."""
    build = import_callable(name.removeprefix(PREFIX), "environment")
    return RslRlEnv(build(num_envs=num_envs, device=device, seed=seed, **env_args), clip_actions, obs_groups.split(","))


class RslRlEnv:
    """A VecEnv, which resets itself and does not report the final observation of an episode.

    The observations are those of the named groups, joined. Other groups, such as "critic", are not used.
    """

    is_capturable = False

    def __init__(self, env: Any, clip_actions: float | None = None, obs_groups: Sequence[str] = ("policy",)):
        missing = [name for name in NEEDED_ATTRIBUTES if not hasattr(env, name)]
        if missing:
            raise UserError(f"{type(env).__name__} is no RSL-RL VecEnv: it has no {', '.join(missing)}")
        self._env, self._groups, self._clip = env, tuple(obs_groups), clip_actions
        self.num_envs: int = env.num_envs
        self.device = torch.device(env.device)
        first = self._join(env.get_observations())
        limit = np.inf if clip_actions is None else clip_actions
        self.spec = EnvSpec(
            spaces.Box(-np.inf, np.inf, tuple(first.shape[1:]), np.float32),
            spaces.Box(-limit, limit, (int(env.num_actions),), np.float32),
            reports_final_obs=False,
        )
        self._extras: dict[str, Any] = {}
        self._log = StepLog()

    def reset(self) -> Tensor:
        """The current observations. RSL-RL's runner does not reset either: an environment has begun when it is made."""
        return self._join(self._env.get_observations()).clone()

    def step(self, action: Tensor) -> TensorStep:
        self._log.clear(self._extras)
        if self._clip is not None:
            action = action.clamp(-self._clip, self._clip)
        groups, reward, dones, self._extras = self._env.step(action)
        self._log.add(self._extras)
        ended = dones.to(torch.bool)
        time_outs = self._extras.get("time_outs")
        # Some environments write a time-out only when an episode ends, so in other rows it may be an old one.
        truncated = torch.zeros_like(ended) if time_outs is None else ended & time_outs.to(torch.bool)
        obs = self._join(groups).clone()
        return TensorStep(obs, obs, reward.clone(), ended & ~truncated, truncated)

    def metrics(self) -> Metrics:
        """Means of what the environment has put in `extras["log"]` since the last call."""
        return self._log.read()

    def close(self) -> None:
        if hasattr(self._env, "close"):  # VecEnv's interface does not require it
            self._env.close()

    def _join(self, groups: Any) -> Tensor:
        if isinstance(groups, Tensor):
            return groups
        missing = [group for group in self._groups if group not in groups.keys()]  # noqa: SIM118 (a TensorDict)
        if missing:
            raise UserError(
                f"the environment has no observations {missing[0]!r}: it has {', '.join(sorted(groups.keys()))}; "
                "give --env-args obs_groups NAME, or NAME,NAME"
            )
        return (
            torch.cat([groups[group] for group in self._groups], -1)
            if len(self._groups) > 1
            else groups[self._groups[0]]
        )
