"""Says what a run waits for when a lost Ray worker is not replaced soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("freerun")

FIRST_WARNING_SECONDS = 5.0
"""A lost worker is mostly back before this time. If not, the user is told what the run waits for, and again each time
the wait has become twice as long."""


class ReplacementWaits:
    """Workers that were lost and are not back, and when the user is told about each of them."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._next_warning_seconds: dict[int, float] = {}

    def begin(self, worker: int) -> None:
        self._since.setdefault(worker, time.monotonic())
        self._next_warning_seconds.setdefault(worker, FIRST_WARNING_SECONDS)

    def end(self, worker: int) -> None:
        if worker in self._since:
            seconds = time.monotonic() - self._since.pop(worker)
            if self._next_warning_seconds.pop(worker) > FIRST_WARNING_SECONDS:
                logger.warning("worker %d: its replacement is ready, after %.0f s", worker, seconds)

    def warn(self, awaited_for: Callable[[int], str]) -> None:
        """Log what is awaited, for every worker whose time has come."""
        for worker, since in self._since.items():
            seconds = time.monotonic() - since
            if seconds >= self._next_warning_seconds[worker]:
                self._next_warning_seconds[worker] *= 2
                logger.warning("worker %d: waiting for %s, %.0f s so far", worker, awaited_for(worker), seconds)
