"""A curriculum: the task gets harder when the policy has learned the easier one.

    python examples/curriculum.py

or, from the command line:

    freerun train curriculum:Corridor --callback curriculum:Longer --total-steps 60000
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import freerun

LENGTHS = (2, 4, 8, 16)


class Corridor(gymnasium.Env[Any, Any]):
    """Find the way to the right end. A longer corridor is hardly ever walked through by chance."""

    def __init__(self, length: int = LENGTHS[0]):
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length = length

    def set_env_args(self, length: int) -> None:
        """Take another length before the next reset. Without this method the environment would be built anew."""
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position, self._num_steps = 0, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._position = max(0, self._position + (1 if action == 1 else -1))
        self._num_steps += 1
        arrived = self._position == self._length
        return self._observe(), float(arrived), arrived, self._num_steps >= 3 * self._length, {}

    def _observe(self) -> Any:
        return np.array([self._position / LENGTHS[-1], self._position % 2], np.float32)


class Longer:
    """Goes on to the next length when nearly all of the newest episodes arrive."""

    def __init__(self) -> None:
        self.level, self._changed_at = 0, 0

    def on_update(self, update: freerun.Update) -> None:
        # The mean is over the newest hundred episodes: give those of the new length time to arrive.
        is_settled = update.episodes - self._changed_at > 150
        if is_settled and update.metrics["return_mean"] > 0.9:
            if self.level == len(LENGTHS) - 1:
                update.stop(f"the longest corridor, {LENGTHS[-1]}, is solved")
                return
            self.level, self._changed_at = self.level + 1, update.episodes
            update.set_env_args(length=LENGTHS[self.level])


if __name__ == "__main__":
    teacher = Longer()
    result = freerun.train(
        Corridor,
        num_workers=2,
        total_steps=200_000,
        steps_per_update=500,
        quiet=True,
        on_update=teacher.on_update,
    )
    print(f"{result.summary['outcome']} ({result.summary.get('reason')}) at length {LENGTHS[teacher.level]}")
    print(f"mean return {result.summary['mean_return']:.2f}")
