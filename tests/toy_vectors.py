"""Vector environments for tests: one that counts, and Gymnasium's own over toy environments."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

Numbers = np.ndarray[Any, Any]


class Counting(VectorEnv[Any, Any, Any]):
    """Environment k shows [k, its episodes so far, the steps of this one]; an episode has `length` + k steps.

    A step earns its number. Episodes with even numbers terminate, the others are truncated."""

    def __init__(self, num_envs: int, mode: str = "NEXT_STEP", length: int = 2, with_final_obs: bool = True) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, np.inf, (3,), np.float64)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._mode = AutoresetMode[mode]
        self.metadata = {"autoreset_mode": self._mode}
        self._lengths = length + np.arange(num_envs)
        self._with_final_obs = with_final_obs
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Numbers, dict[str, Any]]:
        self.seeds.append(seed)
        chosen = None if options is None else options["reset_mask"]
        if chosen is None:
            self._episode, self._step = np.zeros(self.num_envs), np.zeros(self.num_envs)
        else:
            self._restart(chosen)
        self._has_ended = np.zeros(self.num_envs, np.bool_)
        return self._observe(), {}

    def _restart(self, chosen: Numbers) -> None:
        self._episode[chosen] += 1
        self._step[chosen] = 0

    def step(self, actions: Any) -> tuple[Numbers, Numbers, Numbers, Numbers, dict[str, Any]]:
        assert self.action_space.contains(actions)
        resting = self._has_ended & (self._mode is AutoresetMode.NEXT_STEP)
        self._step += 1
        reward = np.where(resting, 0.0, self._step)
        self._restart(resting)
        self._has_ended = (self._step == self._lengths) & ~resting
        terminated = self._has_ended & (self._episode % 2 == 0)
        truncated = self._has_ended & ~terminated
        infos: dict[str, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP and self._has_ended.any():
            if self._with_final_obs:
                infos = {"final_obs": self._observe(), "_final_obs": self._has_ended}
            self._restart(self._has_ended)
        return self._observe(), reward, terminated, truncated, infos

    def _observe(self) -> Numbers:
        return np.stack([np.arange(self.num_envs), self._episode, self._step], axis=1)


class SilentCounting(Counting):
    """Does not say when it resets itself."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.metadata = {}


def synced(num_envs: int, env: str, mode: str, **env_args: Any) -> SyncVectorEnv:
    """Gymnasium's own vector environment over one of the toy environments."""
    make = functools.partial(getattr(toy_envs, env), **env_args)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode[mode])


def always_two() -> SyncVectorEnv:
    return SyncVectorEnv([toy_envs.OneBit] * 2)


def optional(num_envs: int = 5, mode: str = "NEXT_STEP") -> Counting:
    """Has a number of environments of its own, if none is asked for."""
    return Counting(num_envs, mode)


def one_env(num_envs: int) -> toy_envs.OneBit:
    """Takes a number of environments, and returns one."""
    return toy_envs.OneBit()
