"""Environments whose observations are images: a ball falls, and a paddle at the bottom catches it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.adapters.env_wrappers import FrameStack

Kind = str


class FallingBall(gymnasium.Env[Any, Any]):
    """+1 for a catch and -1 for a miss. An episode has one step fewer than the picture has rows.

    The kinds: pixels (the picture, channels last), channels-first, sensor (a Dict of the picture and the paddle's
    place, which the picture does not show), masked (the paddle may not leave the picture)."""

    def __init__(self, kind: Kind = "pixels", size: int = 12, fails_with_torch: bool = False):
        self._kind, self._size, self._fails_with_torch = kind, size, fails_with_torch
        shape = (1, size, size) if kind == "channels-first" else (size, size, 1)
        picture = spaces.Box(0, 255, shape, np.uint8)
        place = spaces.Box(0, size, (1,), np.float64)
        self.observation_space: spaces.Space[Any] = picture
        if kind == "sensor":
            self.observation_space = spaces.Dict(camera=picture, place=place)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fails_with_torch and "torch" in sys.modules:
            raise RuntimeError("this process has loaded torch")
        self._row, self._column = 0, int(self.np_random.integers(self._size))
        self._paddle = self._size // 2
        return self._look(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._kind == "masked" and not self._info()["action_mask"][int(action)]:
            raise ValueError(f"action {action} is not allowed")
        self._paddle = int(np.clip(self._paddle + int(action) - 1, 0, self._size - 1))
        self._row += 1
        is_down = self._row == self._size - 1
        reward = (1.0 if abs(self._paddle - self._column) <= 1 else -1.0) if is_down else 0.0
        return self._look(), reward, is_down, False, self._info()

    def _look(self) -> Any:
        picture = np.zeros((self._size, self._size), np.uint8)
        picture[self._row, self._column] = 255
        if self._kind == "sensor":
            return {"camera": picture[:, :, None], "place": np.array([float(self._paddle)])}
        picture[-1, max(0, self._paddle - 1) : self._paddle + 2] = 255
        return picture[None] if self._kind == "channels-first" else picture[:, :, None]

    def _info(self) -> dict[str, Any]:
        if self._kind != "masked":
            return {}
        return {"action_mask": np.array([self._paddle > 0, True, self._paddle < self._size - 1], np.int8)}


class GreyBall(FallingBall):
    """The same without channels: a frame to be stacked."""

    def __init__(self) -> None:
        super().__init__(size=12)
        self.observation_space = spaces.Box(0, 255, (12, 12), np.uint8)

    def _look(self) -> Any:
        return super()._look()[:, :, 0]


def stacked_balls() -> gymnasium.Env[Any, Any]:
    """Observations are the last three frames."""
    return FrameStack(GreyBall(), 3)
