"""Statistics of dropped steps: by worker, by the length of their episode, and whether the drops skew the data."""

from __future__ import annotations

import logging
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from freerun.core import Counts

logger = logging.getLogger("freerun")

MEMORY_EPISODES = 1000
"""The bias forgets episodes over about this many newer ones, because lengths change while a policy learns."""
DECAY = 1 - 1 / MEMORY_EPISODES
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
            num_kept = length - num_dropped
            is_compared = float(num_dropped > 0)
            self._blend(DECAY, is_compared, num_dropped, num_dropped * length, num_kept, num_kept * length)

    def settle_many(self, lengths: NDArray[np.int64], num_dropped: NDArray[np.int64]) -> None:
        """Note episodes that have ended, the oldest first: the same as `settle` for each of them, in one go."""
        if not len(lengths):
            return
        has_lost = num_dropped > 0
        found, place = np.unique(lengths[has_lost], return_inverse=True)
        sums_by_length = np.bincount(place, num_dropped[has_lost], len(found)).astype(int)
        self.by_length.update(dict(zip(found.tolist(), sums_by_length.tolist(), strict=True)))
        # The last one counts in full, the one before it times DECAY, and so on.
        weights = DECAY ** np.arange(len(lengths) - 1, -1, -1)
        num_kept = lengths - num_dropped
        sums = (has_lost, num_dropped, num_dropped * lengths, num_kept, num_kept * lengths)
        self._blend(DECAY ** len(lengths), *(float(weights @ numbers) for numbers in sums))

    def _blend(
        self, decay: float, is_compared: float, dropped: float, dropped_lengths: float, kept: float, kept_lengths: float
    ) -> None:
        """Add to exponential moving sums, in which each newer episode makes the older ones count less."""
        self._num_compared = decay * self._num_compared + is_compared
        self._dropped = decay * self._dropped + dropped
        self._dropped_lengths = decay * self._dropped_lengths + dropped_lengths
        self._kept = decay * self._kept + kept
        self._kept_lengths = decay * self._kept_lengths + kept_lengths
        if dropped and abs(self.bias) > ALARM_BIAS:
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
