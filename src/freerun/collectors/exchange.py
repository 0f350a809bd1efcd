"""What lies between the learner and the threads that bring it segments: a lock, a store, and how failures are met."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from freerun.collectors.rollout import NotFinite
from freerun.core import CollectorSettings, Counts, Demand, Segment

logger = logging.getLogger("freerun")
Result = TypeVar("Result")

SWITCH_SECONDS = 0.0001
"""How long another thread waits for the interpreter while the learner updates: several times for every unit, and a
worker waits with it. Python's own 5 ms would add up."""
MAX_FAILURES_IN_A_ROW = 3
TOLERATED_IN_A_ROW = 8
"""At least, where training goes on: a batch of a thousand steps that never fails is rare if one in a thousand does."""
REST_SECONDS = 0.1
MOST_REST_SECONDS = 5.0


class Store(Protocol):
    """Which units may start, and where finished ones wait for the learner: `Rounds`, or a `Stream`."""

    book: Counts
    version: int

    def open(self, demand: Demand) -> None: ...
    def next(self) -> int | None: ...
    def seconds_to_next(self) -> float | None: ...
    def finish(self, number: int, segment: Segment) -> None: ...
    def lost(self, number: int) -> None: ...
    def counts(self) -> Counts: ...
    def take(self) -> list[Segment] | None: ...
    def take_arrived(self) -> list[Segment]: ...


class Patience:
    """How often workers may fail, and how long one that failed rests before it is started again."""

    def __init__(self, num_workers: int, tolerant: bool):
        # All workers may fail at once, and each again, before those who tolerate it give up.
        tolerated = max(TOLERATED_IN_A_ROW, MAX_FAILURES_IN_A_ROW * num_workers)
        self._limit = tolerated if tolerant else MAX_FAILURES_IN_A_ROW
        self._in_a_row = 0
        self._of_worker: Counter[int] = Counter()

    def delivered(self, worker: int) -> None:
        self._in_a_row = self._of_worker[worker] = 0

    def failed(self, worker: int, failure: Exception) -> float:
        """The seconds to rest. Where nobody gets anything done any more, the failure is the run's."""
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise type(failure)(
                f"workers failed {self._in_a_row} times in a row without finishing anything; the last time: {failure}"
            )
        self._of_worker[worker] += 1
        return min(MOST_REST_SECONDS, REST_SECONDS * (self._of_worker[worker] - 1))


class Exchange:
    """The learner's half of the modes that collect while it updates."""

    def __init__(self, settings: CollectorSettings, store: Store, tolerant: bool):
        self.num_workers = num_workers = settings.num_workers
        self._tracks = settings.tracks
        self._store = store
        self._tolerant = tolerant
        self._patience = Patience(num_workers, tolerant)
        self.weigh: Callable[[Segment], None] | None = None  # by a store that prefers some segments
        self._changed = threading.Condition()  # guards the store, the patience and the failure
        self._failure: Exception | None = None
        self._switch_interval = sys.getswitchinterval()

    def _start(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)

    def close(self) -> None:
        sys.setswitchinterval(self._switch_interval)

    # ------------------------------------------------------------------------------------------ the learner's thread

    def counts(self) -> Counts:
        with self._changed:
            return self._store.counts()

    def collect(self, demand: Demand) -> list[Segment]:
        if not demand:
            with self._changed:
                self._raise_failure()
                segments = self._store.take_arrived()
            if segments:
                self._room_was_made()
            return segments
        with self._changed:
            self._store.open(demand)
        self._room_was_made()
        return self._wait_for(self._store.take)

    def _room_was_made(self) -> None:
        """More may start: for those who deal it out."""

    def _wait_for(self, attempt: Callable[[], Result | None]) -> Result:
        """Try after every change until there is a result."""
        with self._changed:
            while True:
                self._raise_failure()
                if (result := attempt()) is not None:
                    return result
                self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------ other threads

    def _finish(self, worker: int, unit: int, segment: Segment) -> None:
        if self.weigh is not None:
            self.weigh(segment)  # may take a while: the learner need not wait for it
        with self._changed:
            self._store.finish(unit, segment)
            self._patience.delivered(worker)

    def _restart_after(self, worker: int, failure: Exception) -> float:
        """The seconds that a worker rests before it is started again; raises when that has happened too often."""
        with self._changed:
            seconds = self._patience.failed(worker, failure)
            self._store.book.worker_restarts += 1
            self._store.book.segments_rejected += isinstance(failure, NotFinite)
        logger.warning("worker %d is started again: %s", worker, failure)
        return seconds

    def _end_with(self, failure: Exception) -> None:
        """The run ends: the learner raises this when it next collects."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
