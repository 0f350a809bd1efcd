"""`freerun/TMaze-v0`: a corridor that ends in a junction. The way to turn there is shown once, at the entrance.

The task is that of Bakker 2002 ("Reinforcement learning with long short-term memory"). At the junction both kinds of
episode look the same, so a policy without a memory turns the wrong way in half of them.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import FloatArray, UserError

GO_ON, TURN_LEFT, TURN_RIGHT = range(3)
WASTED_STEP_REWARD = -0.1
"""For turning into a wall of the corridor, and for walking into the wall behind the junction."""


class TMaze(gymnasium.Env[FloatArray, np.int64]):
    """The right turn at the junction earns 1 and the wrong one -1; both end the episode.

    An observation holds the signal, -1 (left) or 1 (right) at the entrance and 0 elsewhere, and whether this is the
    junction. The best return is 1 with a memory, and 0 on average without one.
    """

    def __init__(self, length: int = 10):
        """`length` is the number of steps from the entrance to the junction."""
        if length < 1:
            raise UserError(f"TMaze needs a length of at least 1, not {length}")
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self._is_right = bool(self.np_random.integers(2))
        self._place = self._num_steps = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        is_turn, is_junction = action != GO_ON, self._place == self._length
        reward = 0.0
        if is_turn == is_junction:
            self._place += not is_junction
            if is_junction:
                reward = 1.0 if (action == TURN_RIGHT) == self._is_right else -1.0
        else:
            reward = WASTED_STEP_REWARD
        terminated = is_turn and is_junction
        # Long enough for a policy that wastes half of its steps.
        truncated = not terminated and self._num_steps >= 2 * self._length + 2
        return self._observe(), reward, bool(terminated), bool(truncated), {}

    def _observe(self) -> FloatArray:
        signal = 0.0 if self._place else 1.0 if self._is_right else -1.0
        return np.array([signal, self._place == self._length], np.float32)
