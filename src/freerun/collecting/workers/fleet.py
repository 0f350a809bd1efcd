"""The fleet: a collector whose workers are granted units of work and go on while the learner updates."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.collecting.scheduling.scheduler import BoundedScheduler, Scheduler, queue_size_tunable
from freerun.collecting.scheduling.units import Units
from freerun.collecting.workers.hang_detector import HangDetector
from freerun.collecting.workers.worker_handle import UnitFinished, WorkerHandle, WorkerLost, WorkerPlace, WorkerReady
from freerun.collecting.workers.worker_roster import WorkerRoster
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    FloatArray,
    ModeOptions,
    Segment,
    StartPoint,
    Tunable,
    TuningBounds,
)

Result = TypeVar("Result")

CLOSE_SECONDS = 1.0
SWITCH_SECONDS = 0.0001
"""How long another thread waits for the interpreter while the learner updates. The fleet's thread waits several times
for every unit, and a worker waits with it, so Python's own 5 ms would add up."""
SEGMENT_STEPS_FACTOR = 4
"""--adapt may make segments this many times longer or shorter than configured."""


class SegmentPlace(Protocol):
    """A place whose workers hand over segments of a length that can be changed."""

    segment_steps: int


class WorkerFleet:
    """A `Collector`: grants units to workers, receives what they finish, and hands it to the learner.

    A mode chooses three parts in its constructor and then calls `start`. The `scheduler` decides which units may start,
    the kind of `units` what becomes of those that a lost worker held, and workers live in `place`. The fleet has a
    thread of its own, so that workers are served while the learner updates.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        options: ModeOptions,
        scheduler: Scheduler,
        units: Units,
        place: WorkerPlace,
    ):
        self.changed = threading.Condition()
        """Guards the scheduler, the failure and the learner's wait."""
        self.roster = WorkerRoster(settings, scheduler, units, place, self.changed)
        """The workers that are there, and those that are wanted."""
        self.importance: Callable[[Segment], float] | None = None
        """How important a segment is, for a scheduler that prefers some of them."""
        self.own_tunables: list[Tunable] = []
        """What the mode lets --adapt change besides the number of workers."""
        self._options = options
        self._max_workers = settings.max_workers
        self._bounds: TuningBounds | None = settings.tuning_bounds
        self._scheduler = scheduler
        self._units = units
        self._place = place
        self._unflushed: list[WorkerHandle] = []  # those that reported or were granted something
        self._failure: Exception | None = None
        self._attempt: Callable[[], Any] | None = None  # what the learner waits for
        self._result: Any = None  # what it returned, until the learner has fetched it
        self._is_closing = False
        self._old_switch_interval: float | None = None
        look = (place.look_seconds, place.ending_lock, place.before_look)
        self._detector = HangDetector(settings, self.roster.workers, *look)
        self._thread = threading.Thread(target=self._run, name="freerun-fleet", daemon=True)

    def start(self) -> None:
        """Start the workers and the threads that serve and watch them, and wait until the workers are ready."""
        # The interval belongs to the whole process, which may go on without us: `close` sets the old one again.
        self._old_switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self.roster.start_all()
            self._thread.start()
            self._detector.start()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until a run may begin: most modes wait for all workers."""
        self.wait_for_workers()

    # ------------------------------------------------------------------------------------------ the learner's thread

    @property
    def num_workers(self) -> int:
        return self.roster.num_workers

    def publish(self, weights: FloatArray, version: int) -> None:
        # First the weights, then the version that grants units: no unit may start with weights that are too old.
        self._place.publish(weights, version)
        with self.changed:
            self._scheduler.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if demand:
            self._options.check(demand)
            with self.changed:
                self._scheduler.open(demand)
            self.wake()
            segments = self._wait_for(self._scheduler.take)
        else:
            with self.changed:
                self._raise_failure()
                segments = self._scheduler.take_arrived()
            if segments:
                self.wake()  # what was taken makes room for more
        if any(segment.resting is not None for segment in segments):
            return without_resting_rows(segments)
        return segments

    def counts(self) -> Counts:
        with self.changed:
            counts = self._scheduler.counts()
        # Heartbeats need no lock, and summing up those of a hundred workers would hold up the fleet's thread.
        return replace(counts, step_calls=self._place.num_step_calls())

    def renew(self, start: StartPoint) -> None:
        """Begin another training with the same workers."""
        with self.changed:
            self._units.renew(start)

    def resize(self, num_workers: int) -> None:
        """Have another number of workers from now on. Surplus ones go when they have nothing left to do."""
        with self.changed:
            self.roster.resize(num_workers)
        self.wake()

    def wake(self) -> None:
        """Tell the fleet's thread that more units may start, or that other workers are wanted."""
        self._place.wake()

    def wait_for_workers(self, seconds: float | None = None) -> None:
        """Wait until all workers are ready, or the time is over."""
        deadline = None if seconds is None else time.monotonic() + seconds

        def is_over() -> bool | None:
            is_late = deadline is not None and time.monotonic() >= deadline
            return is_late or self.roster.num_ready() == self.num_workers or None

        self._wait_for(is_over)

    def _wait_for(self, attempt: Callable[[], Result | None]) -> Result:
        """Try after every change until there is a result; raise if the run has to end."""
        with self.changed:
            # The fleet's thread makes the next attempts (`_try_for_learner`), with the lock that it holds anyway: the
            # learner is woken up once, and not for every unit.
            self._attempt = attempt
            try:
                while True:
                    self._raise_failure()
                    result = attempt() if self._result is None else self._result
                    if result is not None:
                        return result
                    self.changed.wait()
            finally:
                self._attempt = self._result = None

    def _raise_failure(self) -> None:
        """Raise what has ended the fleet, if anything has. The caller holds the lock."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        if self._old_switch_interval is not None:
            sys.setswitchinterval(self._old_switch_interval)
        self._is_closing = True  # without a lock: the fleet's thread reads it after `wake` has woken it up
        self._detector.close()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # a worker that has stopped in the middle of a message holds it up
            self._place.abort()
            self._thread.join()
        self._place.close()

    # ------------------------------------------------------------------------------------------ the fleet's thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self.turn()
        except Exception as failure:  # it reaches the user through the next `_wait_for`
            with self.changed:
                self._failure = failure
                self.changed.notify_all()

    def turn(self) -> None:
        """Wait for reports once, and do what follows from them."""
        for report in self._place.wait(self._seconds_to_wait()):
            if isinstance(report, UnitFinished):
                self._finish(report)
            elif isinstance(report, WorkerReady):
                report.worker.is_ready = True
            elif isinstance(report, WorkerLost):
                self.roster.replace(report)
            else:
                self.roster.fail_unit(report)
        self.roster.start_due()
        if self.roster.start_and_retire():
            self.wake()
        with self.changed:
            self._try_for_learner()  # first, because what the learner takes makes room for new units
            self._grant()

    def _finish(self, report: UnitFinished) -> None:
        worker, unit, segment = report
        # This may take a while, so it happens before the learner's lock is taken.
        importance = 0.0 if self.importance is None else self.importance(segment)
        with self.changed:
            self._scheduler.finish(unit, segment, importance)
        # Only the fleet's thread changes what follows, so the learner's lock is not needed for it.
        self.roster.policy.delivered(worker.index)
        worker.units.remove(unit)
        worker.capacity = self._units.capacity(segment.seconds)
        self._unflushed.append(worker)

    def _grant(self) -> None:
        """Grant what may start, first to workers that hold the fewest units, so that none hoards what others could run.

        The caller holds the lock.
        """
        free = self.roster.free_workers()
        for num_held in range(max((worker.capacity for worker in free), default=0)):
            for worker in free:
                if len(worker.units) == num_held < worker.capacity:
                    unit = worker.reserved_units.pop(0) if worker.reserved_units else self._scheduler.next()
                    if unit is not None:
                        worker.units.append(unit)
                        worker.grant(unit)
                        self._unflushed.append(worker)
        for worker in self._unflushed:
            if not worker.is_gone:  # it may have reported something just before its end
                worker.flush()
        self._unflushed.clear()

    def _try_for_learner(self) -> None:
        """Wake the learner if what it waits for is there, and not for every unit of it. The caller holds the lock."""
        if self._attempt is not None and self._result is None:
            self._result = self._attempt()
            if self._result is not None:
                self.changed.notify_all()

    def _seconds_to_wait(self) -> float | None:
        """Return when there is something to do that nobody will report; None if there is nothing."""
        to_restart, to_next = self.roster.seconds_to_restart(), self._scheduler.seconds_to_next()
        # A scheduler that counts time makes nobody wait but those who could take a unit.
        if to_next is None or not any(not self.roster.is_surplus(worker) for worker in self.roster.free_workers()):
            return to_restart
        return to_next if to_restart is None else min(to_restart, to_next)

    # ------------------------------------------------------------------------------------------ what --adapt may change

    def tunables(self) -> list[Tunable]:
        """The number of workers, and what the mode adds.

        Workers are started, or let go when they have nothing left to do: nothing is lost.
        """
        if self._max_workers == 1:
            return self.own_tunables
        read, apply = lambda: self.num_workers, lambda value: self.resize(int(value))
        workers = Tunable("num_workers", read, apply, 1.0, self._max_workers, is_settled=self.roster.is_complete)
        return [workers, *self.own_tunables]

    def queue_tunable(self, queue: BoundedScheduler) -> Tunable:
        """The length of the mode's queue."""

        def resize(queue_size: int) -> None:
            with self.changed:
                queue.resize(queue_size)
            self.wake()

        return queue_size_tunable(lambda: queue.queue_size or 0, resize, self._bounds)

    def segment_tunable(self, place: SegmentPlace, note: Callable[[int], None] = lambda segment_steps: None) -> Tunable:
        """The steps of every environment that are handed over at a time. `note` is called with the lock held."""

        def apply(value: float) -> None:
            with self.changed:
                place.segment_steps = int(value)
                note(int(value))

        configured = place.segment_steps
        low, high = max(1.0, configured // SEGMENT_STEPS_FACTOR), configured * SEGMENT_STEPS_FACTOR
        return Tunable("collection_batch", lambda: place.segment_steps, apply, low, high)
