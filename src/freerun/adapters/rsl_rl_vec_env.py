"""Puts freerun's tensor environments under RSL-RL's own runner: `OnPolicyRunner(RslRlVecEnv(env), …)`."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.adapters.space_adapter import CRITIC_GROUP, POLICY_GROUP
from freerun.core import TensorEnv, UserError

try:
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict
except ImportError as error:
    raise UserError(f"RSL-RL is not installed ({error}): pip install 'freerun[rsl-rl]'") from error

DEFAULT_EPISODE_LENGTH = 1000
"""What the runner is told if the environment does not say how long its episodes are."""


class RslRlVecEnv(VecEnv):
    """A `core.TensorEnv` as a VecEnv, with the observation groups "policy" and, where there is one, "critic"."""

    def __init__(self, env: TensorEnv):
        if not isinstance(env.spec.action_space, spaces.Box):
            raise UserError(
                f"RSL-RL's policies act in a Box, and the environment's actions are {env.spec.action_space}"
            )
        self._env = env
        self.num_envs = env.num_envs
        self.num_actions = int(env.spec.action_space.shape[0])
        self.device = env.device
        self.cfg: dict[str, Any] = {}
        self.max_episode_length = int(getattr(env, "max_episode_steps", DEFAULT_EPISODE_LENGTH))
        # An environment such as RoughDrone has the number of steps of each episode in `steps`, where it may be written.
        steps_of_env = getattr(env, "steps", None)
        self._counts_itself = steps_of_env is not None
        if steps_of_env is None:
            steps_of_env = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._steps: Tensor = steps_of_env
        self._obs = env.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        return self._steps

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        """The runner writes random numbers here, so that the first episodes do not all end at the same time."""
        self._steps.copy_(value)

    def get_observations(self) -> TensorDict:
        groups = {POLICY_GROUP: self._obs}
        if self._env.spec.obs_groups is not None:
            sizes = [math.prod(group.shape) for group in self._env.spec.obs_groups.present]
            groups = dict(zip((POLICY_GROUP, CRITIC_GROUP), torch.split(self._obs, sizes, dim=1), strict=True))
        return TensorDict(groups, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self._obs, _, reward, terminated, truncated = self._env.step(actions)
        ended = terminated | truncated
        if not self._counts_itself:
            self._steps.add_(1).masked_fill_(ended, 0)
        extras: dict[str, Any] = {"time_outs": truncated}
        if logged := self._env.metrics():
            extras["log"] = logged
        return self.get_observations(), reward, ended.long(), extras

    def close(self) -> None:
        self._env.close()
