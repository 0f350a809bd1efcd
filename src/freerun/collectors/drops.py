"""Steps that were thrown away: by worker, by the length of their episode, and whether that skews what is learned."""

from __future__ import annotations

import logging
import time
from collections import Counter

from freerun.core import Counts

logger = logging.getLogger("freerun")

MEMORY_EPISODES = 1000
"""Lengths change while a policy learns, so that older episodes count less and less."""
FEWEST_EPISODES = 100
"""That lost steps, before their lengths are compared with those of others."""
ALARM_BIAS = 0.2
ALARM_EVERY_SECONDS = 60.0


class Drops:
    """What a queue has dropped.

    The bias compares steps, not episodes: a long episode lies in many batches, so one of them is lost more often even
    where every batch is dropped with the same chance and the steps that are left are as they should be.
    """

    def __init__(self, before: Counts | None = None) -> None:
        before = before or Counts()
        self.steps = before.steps_dropped
        self.by_worker: Counter[int] = Counter(before.steps_dropped_by_worker)
        self.by_length: Counter[int] = Counter(before.steps_dropped_by_length)
        self._num_compared = 0.0  # episodes that lost steps
        self._dropped = self._dropped_lengths = 0.0  # steps, and the sum of their episodes' lengths
        self._kept = self._kept_lengths = 0.0
        self._next_alarm = float("-inf")

    def add(self, worker: int, num_steps: int) -> None:
        self.steps += num_steps
        self.by_worker[worker] += num_steps

    def settle(self, length: int, num_dropped: int, ended: bool) -> None:
        """Nothing more of an episode will come: so long it was, or is as far as anybody knows."""
        if num_dropped:
            self.by_length[length] += num_dropped
        if ended:
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
        """How much longer the episodes of dropped steps are than those of steps that were kept, as a share."""
        if self._num_compared < FEWEST_EPISODES or not self._kept:
            return 0.0
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
