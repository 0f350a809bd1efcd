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

from freerun.adapters.space_adapter import CRITIC_GROUP, POLICY_GROUP
from freerun.adapters.step_log import StepLog
from freerun.core import EnvSpec, Metrics, ObsGroups, TensorStep, UserError, import_callable

PREFIX = "rsl-rl:"
ACTOR_GROUP = "actor"
"""What the policy sees in environments that name their groups after RSL-RL's networks, as mjlab's do."""
NEEDED_ATTRIBUTES = ("num_envs", "num_actions", "device", "get_observations", "step")


def make(
    name: str,
    num_envs: int | None,
    device: str,
    seed: int,
    clip_actions: float | None = None,
    obs_groups: str | None = None,
    critic_groups: str | None = None,
    **env_args: Any,
) -> RslRlEnv:
    """The environment of rsl-rl:module:callable, which is called with num_envs, device, seed and the --env-args."""
    build = import_callable(name.removeprefix(PREFIX), "environment")
    env = build(num_envs=num_envs, device=device, seed=seed, **env_args)
    return RslRlEnv(env, clip_actions, split_groups(obs_groups), split_groups(critic_groups))


def split_groups(named: str | None) -> list[str] | None:
    """The groups that a user has named with commas in between; None if none was named."""
    return None if named is None else named.split(",")


class RslRlEnv:
    """A VecEnv, which resets itself and does not report the final observation of an episode.

    The policy sees the groups of observations that `obs_groups` names, joined, and the value function those that
    `critic_groups` names. Where none is named, these are the groups that RSL-RL knows by itself: "policy", or "actor"
    as in mjlab, and "critic" if the environment has it.
    """

    is_capturable = False
    reset_begins_episodes = False

    def __init__(
        self,
        env: Any,
        clip_actions: float | None = None,
        obs_groups: Sequence[str] | None = None,
        critic_groups: Sequence[str] | None = None,
    ):
        missing = [name for name in NEEDED_ATTRIBUTES if not hasattr(env, name)]
        if missing:
            raise UserError(f"{type(env).__name__} is no RSL-RL VecEnv: it has no {', '.join(missing)}")
        self._env, self._clip = env, clip_actions
        self.num_envs: int = env.num_envs
        self.device = torch.device(env.device)
        first = env.get_observations()
        names = () if isinstance(first, Tensor) else tuple(first.keys())
        if obs_groups is None:
            obs_groups = (ACTOR_GROUP,) if ACTOR_GROUP in names and POLICY_GROUP not in names else (POLICY_GROUP,)
        if critic_groups is None:
            critic_groups = (CRITIC_GROUP,) if CRITIC_GROUP in names else obs_groups
        self._policy_groups, self._critic_groups = tuple(obs_groups), tuple(critic_groups)
        self._is_asymmetric = self._policy_groups != self._critic_groups
        limit = np.inf if clip_actions is None else clip_actions
        actions = spaces.Box(-limit, limit, (int(env.num_actions),), np.float32)
        policy = _space_of(_join(first, self._policy_groups))
        if self._is_asymmetric:
            groups = ObsGroups(policy, _space_of(_join(first, self._critic_groups)))
            self.spec = EnvSpec.of_groups(groups, actions, reports_final_obs=False)
        else:
            self.spec = EnvSpec(policy, actions, reports_final_obs=False)
        self._extras: dict[str, Any] = {}
        self._log = StepLog()

    def reset(self) -> Tensor:
        """The current observations. RSL-RL's runner does not reset either: an environment has begun when it is made."""
        return self._row(self._env.get_observations()).clone()

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
        obs = self._row(groups).clone()
        return TensorStep(obs, obs, reward.clone(), ended & ~truncated, truncated)

    def metrics(self) -> Metrics:
        """Means of what the environment has put in `extras["log"]` since the last call."""
        return self._log.read()

    def close(self) -> None:
        if hasattr(self._env, "close"):  # VecEnv's interface does not require it
            self._env.close()

    def _row(self, groups: Any) -> Tensor:
        """The observations as `spec` has them: of the policy, or the rows of policy and critic."""
        policy = _join(groups, self._policy_groups)
        if not self._is_asymmetric:
            return policy
        return torch.cat([policy.flatten(1), _join(groups, self._critic_groups).flatten(1)], dim=1)


def _join(groups: Any, names: Sequence[str]) -> Tensor:
    if isinstance(groups, Tensor):
        return groups
    missing = [name for name in names if name not in groups.keys()]  # noqa: SIM118 (a TensorDict)
    if missing:
        raise UserError(
            f"the environment has no observations {missing[0]!r}: it has {', '.join(sorted(groups.keys()))}; "
            "give --env-args obs_groups NAME, or NAME,NAME, and critic_groups likewise"
        )
    return torch.cat([groups[name] for name in names], -1) if len(names) > 1 else groups[names[0]]


def _space_of(obs: Tensor) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, tuple(obs.shape[1:]), np.float32)
