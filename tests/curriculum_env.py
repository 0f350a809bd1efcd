"""Environments whose arguments change while a run goes on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Level(gymnasium.Env[Any, Any]):
    """Shows its level in every observation, and is built anew when that changes. Four steps."""

    def __init__(self, level: int = 0) -> None:
        self.observation_space = spaces.Box(0, 100, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._level = level
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        return self._observe(), float(self._level), False, self._num_steps == 4, {}

    def _observe(self) -> Any:
        return np.array([self._level, self.np_random.random()], np.float32)


class KeptLevel(Level):
    """Takes another level without being built anew."""

    def set_env_args(self, level: int) -> None:
        assert self._num_steps in (0, 4), "it is called between two episodes"
        self._level = level


class Widened(Level):
    """Has another observation space at every level, which no policy could follow."""

    def __init__(self, level: int = 0) -> None:
        super().__init__(level)
        self.observation_space = spaces.Box(0, 100 + level, (2,), np.float32)
