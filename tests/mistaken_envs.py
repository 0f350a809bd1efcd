"""Environments with mistakes that people make: old interfaces, raw pixels, vector environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv


class Pixels(gymnasium.Env[Any, Any]):
    """Small images; episodes of five steps."""

    def __init__(self, is_continuous: bool = False, num_frames: int = 0) -> None:
        self._shape = (num_frames, 3, 8, 8) if num_frames else (3, 8, 8)
        self.observation_space = spaces.Box(0, 255, self._shape, np.uint8)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if is_continuous else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observe(), 1.0, False, self._step == 5, {}

    def _observe(self) -> Any:
        return self.np_random.integers(0, 256, self._shape, dtype=np.uint8)


class FourValues(gymnasium.Env[Any, Any]):
    """Its step returns what the old gym's did."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, {}


class BareReset(FourValues):
    """Its reset returns what the old gym's did."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


def behind_a_wrapper() -> gymnasium.Env[Any, Any]:
    """Here Gymnasium's own code stumbles over the four values."""
    return gymnasium.wrappers.TimeLimit(FourValues(), 10)


def vector() -> VectorEnv[Any, Any, Any]:
    return gymnasium.make_vec("CartPole-v1", num_envs=2)
