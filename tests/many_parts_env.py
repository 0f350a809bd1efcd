"""An environment whose observations consist of every kind of part that a policy takes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class ManyParts(gymnasium.Env[Any, Any]):
    """Observations are drawn at random. Five steps."""

    metadata = {"units": {"observation.speed": "m/s"}}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "speed": spaces.Box(-np.inf, np.inf, (1, 2), np.float64),
                "bits": spaces.MultiBinary(2),
                "pair": spaces.Tuple([spaces.Discrete(4, start=3), spaces.MultiDiscrete([2, 3])]),
            }
        )
        self.action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._num_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        return self.observation_space.sample(), float(action == 5), False, self._num_steps == 5, {}
