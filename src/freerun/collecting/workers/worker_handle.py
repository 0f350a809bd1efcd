"""A worker as the fleet sees it, and the place where workers live: what each kind of worker must implement."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from freerun.collecting.workers.hang_detector import Activity, SignOfLife
from freerun.core import FloatArray, Segment, WorkerHung


class WorkerHandle(ABC):
    """One worker: what it holds, how units reach it, and whether it is alive.

    A unit is a piece of work with a number: a whole episode, or the next segment of the worker's environments.
    """

    def __init__(self, index: int):
        self.index = index
        self.is_ready = False
        """Its environments are built, so that it can be granted units."""
        self.is_outdated = False
        """It was started with settings that no longer hold: it is replaced when it has nothing left to do."""
        self.is_gone = False
        """It was lost or let go: nothing can be sent to it any more."""
        self.capacity = 1
        """The number of units that it may hold at once."""
        self.units: list[int] = []
        """Units that were granted to it and have not come back."""
        self.reserved_units: list[int] = []
        """Units that its predecessor lost and that no other worker can run."""

    @abstractmethod
    def grant(self, unit: int) -> None:
        """Let the worker run a unit. A worker that has died is reported soon, so this raises nothing."""

    def flush(self) -> None:  # noqa: B027
        """Send what `grant` has gathered, and what else the worker waits for, after a report or a grant."""

    @abstractmethod
    def retire(self) -> None:
        """Let a worker go that has nothing left to do. Nothing more is reported of it."""

    def suspect_episode(self) -> int | None:
        """Return the episode that it was playing when it failed, where that is known."""
        return None

    def last_begun_episode(self) -> int | None:
        """Return the last episode that it has begun in segments, whether or not a step of it has arrived."""
        return None

    # ------------------------------------------------------------------------------------------ for the hang detector

    def activity(self) -> Activity:
        if not self.is_ready:
            return Activity.STARTING
        return Activity.BUSY if self.units else Activity.WAITING

    @abstractmethod
    def sign_of_life(self) -> SignOfLife: ...

    @abstractmethod
    def episode(self) -> int | None: ...

    def is_stopped(self) -> bool:
        return False

    def has_place(self) -> bool:
        return True

    @abstractmethod
    def stack(self) -> str: ...

    def note_slow_start(self) -> None:  # noqa: B027
        """Most workers need no help."""

    @abstractmethod
    def end_hung(self, failure: WorkerHung) -> None: ...


class WorkerReady(NamedTuple):
    """A worker has built its environments."""

    worker: WorkerHandle


class UnitFinished(NamedTuple):
    """A worker has handed over a unit."""

    worker: WorkerHandle
    unit: int
    segment: Segment


class UnitFailed(NamedTuple):
    """A unit failed, and the worker lives on with whatever else it holds."""

    worker: WorkerHandle
    unit: int
    failure: Exception
    failed_worker: int
    """The index that the failure is counted for: in a pool any process may run any worker's unit."""


class WorkerLost(NamedTuple):
    """A worker is gone, with everything that it held."""

    worker: WorkerHandle
    failure: Exception | None
    """None if it ended through no fault of its own, together with others of which one has failed."""


Report = WorkerReady | UnitFinished | UnitFailed | WorkerLost


class WorkerPlace(ABC):
    """Where workers live: it starts them and waits for what they report. Only the fleet's thread calls `wait`."""

    starts_together = False
    """True where workers can only be started all at once, when none is left."""
    look_seconds: float | None = None
    """The time between two looks of the hang detector, where it is not the usual one."""
    ending_lock: threading.Lock | None = None
    """Held while the hang detector ends a worker, where somebody must wait for its reason."""

    @abstractmethod
    def start(self, index: int) -> WorkerHandle:
        """Start a worker; it reports when it is ready."""

    @abstractmethod
    def wait(self, seconds: float | None) -> Iterable[Report]:
        """Wait until workers report something, `wake` is called, or the time is over."""

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return. Any thread may call this."""

    @abstractmethod
    def publish(self, weights: FloatArray, version: int) -> None:
        """Give these weights to every unit that starts from now on."""

    def num_step_calls(self) -> int | None:
        """Return how many steps and resets the workers have begun, where that is counted."""
        return None

    def resize(self, num_workers: int) -> None:  # noqa: B027
        """Note that the fleet will have this many workers."""

    def before_look(self) -> None:  # noqa: B027
        """Called by the hang detector before each of its looks."""

    def abort(self) -> None:  # noqa: B027
        """End all workers at once, because the fleet's thread waits for one of them and must stop."""

    @abstractmethod
    def close(self) -> None:
        """End all workers and free what they share."""
