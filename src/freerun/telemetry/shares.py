"""Who waits for whom, as shares of the wall clock since the last report."""

from __future__ import annotations

import time

from freerun.core import Metrics


class Shares:
    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._waiting_seconds = 0.0
        self._updating_seconds = 0.0
        self._last = (time.perf_counter(), 0, 0, 0.0)
        self._first_second = self._last[0]

    def learner_waited(self, seconds: float) -> None:
        self._waiting_seconds += seconds

    def learner_updated(self, seconds: float) -> None:
        self._updating_seconds += seconds

    def rates(self, steps: int, episodes: int, busy_seconds: float) -> Metrics:
        """Rates since the last call; the counts are totals."""
        now = (time.perf_counter(), steps, episodes, busy_seconds)
        seconds, new_steps, new_episodes, new_busy = (a - b for a, b in zip(now, self._last, strict=True))
        rates = {
            "wall_seconds": now[0] - self._first_second,
            "interval_seconds": seconds,
            "steps_per_second": new_steps / seconds,
            "episodes_per_second": new_episodes / seconds,
            "learner_waiting_share": self._waiting_seconds / seconds,
            "learner_updating_share": self._updating_seconds / seconds,
            # An episode's time counts when it is handed over, so a window may hold more than its own.
            "workers_busy_share": min(1.0, new_busy / (seconds * self._num_workers)),
        }
        self._last = now
        self._waiting_seconds = self._updating_seconds = 0.0
        return rates
