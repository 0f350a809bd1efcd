"""freerun's tensor environments under RSL-RL's own runner: `OnPolicyRunner(RslRlVecEnv(env), …)`."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.core import TensorEnv, UserError

try:
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict
except ImportError as error:
    raise UserError(f"RSL-RL is not installed ({error}): pip install 'freerun[rsl-rl]'") from error

DEFAULT_EPISODE_LENGTH = 1000


class RslRlVecEnv(VecEnv):
    """All observations are one group, "policy"; time-outs are reported as RSL-RL wants them."""

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
        own = getattr(env, "steps", None)
        """Steps of each episode so far, where the environment lets them be written."""
        self._steps = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device) if own is None else own
        self._counts_itself = own is not None
        self._obs = env.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        return self._steps

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        """The runner spreads the first episodes' ends this way."""
        self._steps.copy_(value)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self._obs}, batch_size=[self.num_envs])

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
