"""What lies between the learner and the threads that bring it segments: a lock, a store, and how failures are met."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from freerun.collectors.supervision import Supervisor
from freerun.core import CollectorSettings, Counts, Demand, Dial, NotFinite, Room, Segment

Result = TypeVar("Result")

SWITCH_SECONDS = 0.0001
"""How long another thread waits for the interpreter while the learner updates: several times for every unit, and a
worker waits with it. Python's own 5 ms would add up."""


class Store(Protocol):
    """Which units may start, and where finished ones wait for the learner: `Rounds`, or a `Stream`."""

    book: Counts
    version: int

    def open(self, demand: Demand) -> None: ...
    def next(self) -> int | None: ...
    def seconds_to_next(self) -> float | None: ...
    def finish(self, number: int, segment: Segment) -> None: ...
    def lost(self, number: int) -> None: ...
    def give_up(self, number: int) -> None: ...
    def counts(self) -> Counts: ...
    def take(self) -> list[Segment] | None: ...
    def take_arrived(self) -> list[Segment]: ...


class Queue(Store, Protocol):
    """A store with room for so many segments."""

    queue_size: int

    def resize(self, queue_size: int) -> None: ...


LONGEST_QUEUE = 64
"""As far as a shorter one may grow, if nobody says how far."""


class Exchange:
    """The learner's half of the modes that collect while it updates."""

    def __init__(self, settings: CollectorSettings, store: Store, tolerant: bool):
        self.num_workers = settings.num_workers
        self._bounds: Room | None = settings.room
        self._tracks = settings.tracks
        self._store = store
        self._tolerant = tolerant
        self._supervisor = Supervisor(settings, tolerant)
        self.weigh: Callable[[Segment], None] | None = None  # by a store that prefers some segments
        self._changed = threading.Condition()  # guards the store and the failure
        self._failure: Exception | None = None
        self._awaited: Callable[[], Any] | None = None  # what the learner waits for
        self._result: Any = None  # and has not fetched yet
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

    def _queue_dial(self, queue: Queue) -> Dial:
        """What --adapt may move of a store's room."""

        def turn(value: float) -> None:
            with self._changed:
                queue.resize(int(value))
            self._room_was_made()

        most = self._bounds.most_queue_size if self._bounds is not None else None
        size = queue.queue_size
        return Dial("queue_size", lambda: queue.queue_size, turn, 1.0, max(size, most or LONGEST_QUEUE))

    def _room_was_made(self) -> None:
        """More may start: for those who deal it out."""

    def _wait_for(self, attempt: Callable[[], Result | None]) -> Result:
        """Try after every change until there is a result."""
        with self._changed:
            self._awaited = attempt
            try:
                while True:
                    self._raise_failure()
                    result = attempt() if self._result is None else self._result
                    if result is not None:
                        return result
                    self._changed.wait()
            finally:
                self._awaited = self._result = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------ other threads

    def _finish(self, worker: int, unit: int, segment: Segment) -> None:
        if self.weigh is not None:
            self.weigh(segment)  # may take a while: the learner need not wait for it
        with self._changed:
            self._store.finish(unit, segment)
        self._supervisor.delivered(worker)

    def _try_for_learner(self) -> None:
        """With the lock held: wake the learner if there is what it waits for, and not for every unit of it."""
        if self._awaited is not None and self._result is None:
            self._result = self._awaited()
            if self._result is not None:
                self._changed.notify_all()

    def _restart_after(self, worker: int, failure: Exception, episodes: Sequence[int] = ()) -> float:
        """The seconds that a worker rests before it is started again; raises when that has happened too often."""
        seconds = self._supervisor.failed(worker, failure, episodes)
        with self._changed:
            self._store.book.worker_restarts += 1
            self._store.book.segments_rejected += isinstance(failure, NotFinite)
        return seconds

    def _end_with(self, failure: Exception) -> None:
        """The run ends: the learner raises this when it next collects."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
