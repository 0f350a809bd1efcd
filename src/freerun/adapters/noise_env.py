"""An environment of noise with given spaces. The probe uses it to time modes and updates without a simulator's cost."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import ActionSpace, Array

NUM_OBSERVATIONS = 64
"""The number of observations that are drawn in advance and then repeated."""


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Repeats observations and rewards that it has drawn in advance. Episodes are truncated after `episode_steps`."""

    def __init__(self, observation_space: spaces.Box, action_space: ActionSpace, episode_steps: int):
        self.observation_space = observation_space
        self.action_space = action_space
        self._episode_steps = episode_steps
        self._observations = _noise(observation_space)
        # Fixed seeds: every probe sees the same noise.
        self._rewards = np.random.default_rng(1).normal(size=NUM_OBSERVATIONS).tolist()
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._step = 0
        return self._observations[0], {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._step += 1
        row = self._step % NUM_OBSERVATIONS
        return self._observations[row], self._rewards[row], False, self._step >= self._episode_steps, {}


def _noise(space: spaces.Box) -> list[Array]:
    rng = np.random.default_rng(0)
    shape = (NUM_OBSERVATIONS, *space.shape)
    if np.issubdtype(space.dtype, np.integer):
        return list(rng.integers(0, 255, shape).astype(space.dtype))
    return list(np.clip(rng.normal(size=shape), space.low, space.high).astype(space.dtype))
