"""Statistics of dropped steps: by worker, by the length of their episode, and whether the drops skew the data."""

from __future__ import annotations

import logging
import time
from collections import Counter

from freerun.core import Counts

logger = logging.getLogger("freerun")

MEMORY_EPISODES = 1000
"""The bias forgets episodes over about this many newer ones, because lengths change while a policy learns."""
MIN_EPISODES = 100
"""The bias is computed once this many episodes have lost steps."""
ALARM_BIAS = 0.2
ALARM_EVERY_SECONDS = 60.0


class DropStatistics:
    """Counts what a queue has dropped.

    The bias compares steps, not episodes. A long episode lies in many batches, so it loses one of them more often even
    where every batch is dropped with the same probability, and then the steps that are left are not skewed.
    """

    def __init__(self, before: Counts | None = None) -> None:
        before = before or Counts()
        self.steps = before.steps_dropped
        self.by_worker: Counter[int] = Counter(before.steps_dropped_by_worker)
        self.by_length: Counter[int] = Counter(before.steps_dropped_by_length)
        self._num_compared = 0.0  # episodes that have ended and lost steps
        self._dropped = self._dropped_lengths = 0.0  # steps, and the sum of their episodes' lengths over these steps
        self._kept = self._kept_lengths = 0.0
        self._next_alarm = float("-inf")

    def add(self, worker: int, num_steps: int) -> None:
        self.steps += num_steps
        self.by_worker[worker] += num_steps

    def settle(self, length: int, num_dropped: int, ended: bool) -> None:
        """Note the final length of an episode, and how many of its steps were dropped. Nothing more of it will come."""
        if num_dropped:
            self.by_length[length] += num_dropped
        if ended:
            # Exponential moving sums, so that each newer episode makes the older ones count less.
            decay, num_kept = 1 - 1 / MEMORY_EPISODES, length - num_dropped
            self._num_compared = decay * self._num_compared + (num_dropped > 0)
            self._dropped = decay * self._dropped + num_dropped
            self._dropped_lengths = decay * self._dropped_lengths + num_dropped * length
            self._kept = decay * self._kept + num_kept
            self._kept_lengths = decay * self._kept_lengths + num_kept * length
            if num_dropped and abs(self.bias) > ALARM_BIAS:
                self._alarm()

    @property
    def bias(self) -> float:
        """Return how much longer the episodes of dropped steps are than those of kept steps, as a share."""
        if self._num_compared < MIN_EPISODES or not self._kept:
            return 0.0
        # mean length over dropped steps / mean length over kept steps - 1
        return (self._dropped_lengths / self._dropped) / (self._kept_lengths / self._kept) - 1

    def _alarm(self) -> None:
        if time.monotonic() >= self._next_alarm:
            self._next_alarm = time.monotonic() + ALARM_EVERY_SECONDS
            logger.warning(
                "dropped steps skew the data: they come from episodes that are %.0f %% %s than those of the steps "
                "that were kept; update faster, or collect less (--num-envs, --num-collectors)",
                100 * abs(self.bias),
                "longer" if self.bias > 0 else "shorter",
            )
