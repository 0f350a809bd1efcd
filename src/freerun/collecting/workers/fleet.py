"""The fleet: workers that are granted units of work, watched, and replaced when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from freerun.collecting.scheduling.scheduler import Scheduler
from freerun.collecting.scheduling.units import Units
from freerun.collecting.workers.hang_detector import HangDetector
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.collecting.workers.worker_handle import (
    UnitFailed,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import CollectorSettings, NotFinite, Segment, State

Result = TypeVar("Result")

CLOSE_SECONDS = 1.0
MIN_PAUSE_SECONDS_ADAPTING = 0.5
"""With --adapt, a failed worker pauses at least this long: long enough to undo a change after which workers fail,
before the same ones fail again."""


@dataclass(frozen=True)
class PendingRestart:
    """A worker that failed and that will be started again."""

    due: float
    """The moment of `time.monotonic` from which on it may start."""
    index: int
    reserved_units: list[int] = field(default_factory=list)
    """Units that only its successor can run."""


class WorkerFleet:
    """Starts workers, grants them units, receives what they finish, and replaces those that fail.

    The fleet has a thread of its own, so that workers are served while the learner updates. What may start is decided
    by the scheduler, what a lost worker leaves behind by the kind of `units`, and where workers live by `place`.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        scheduler: Scheduler,
        units: Units,
        place: WorkerPlace,
    ):
        self.num_workers = settings.num_workers
        """The number of workers that the fleet should have."""
        self.changed = threading.Condition()
        """Guards the scheduler, the failure and the learner's wait."""
        self.importance: Callable[[Segment], float] | None = None
        """How important a segment is, for a scheduler that prefers some of them."""
        self._scheduler = scheduler
        self._units = units
        self._place = place
        self._tracks = settings.tracks
        self._policy = RestartPolicy(settings, units.failure_rules)
        self._min_pause_seconds = 0.0 if settings.tuning_bounds is None else MIN_PAUSE_SECONDS_ADAPTING
        self._workers: list[WorkerHandle] = []
        self._restarts: list[PendingRestart] = []
        self._unflushed: list[WorkerHandle] = []  # those that reported or were granted something
        self._is_settled = False  # the wanted workers are there, or will be when their pause is over
        self._failure: Exception | None = None
        self._attempt: Callable[[], Any] | None = None  # what the learner waits for
        self._result: Any = None  # what it returned, until the learner has fetched it
        self._is_closing = False
        self._detector = HangDetector(settings, self.workers, place.look_seconds, place.ending_lock, place.before_look)
        self._thread = threading.Thread(target=self._run, name="freerun-fleet", daemon=True)

    # ------------------------------------------------------------------------------------------ the learner's thread

    def start(self) -> None:
        """Start the workers, and the threads that serve and watch them."""
        self.start_workers()
        self._thread.start()
        self._detector.start()

    def start_workers(self) -> None:
        """Start the first workers; they report when they are ready."""
        for index in range(self.num_workers):
            self._start_worker(index)

    def workers(self) -> list[WorkerHandle]:
        """Return the workers that are there now. The copy may be used in any thread."""
        return list(self._workers)

    def num_ready(self) -> int:
        return sum(worker.is_ready for worker in self.workers())

    def is_complete(self) -> bool:
        """True when exactly the wanted workers are ready."""
        workers = self.workers()
        return len(workers) == self.num_workers and all(
            worker.is_ready and not self._is_surplus(worker) for worker in workers
        )

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until all workers are ready, or the time is over."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self.wait_for(
            lambda: self.num_ready() == self.num_workers or (deadline is not None and _is_past(deadline)) or None
        )

    def resize(self, num_workers: int) -> None:
        """Have another number of workers from now on. Surplus ones go when they have nothing left to do."""
        with self.changed:
            self.num_workers = num_workers
            self._is_settled = False
            self._place.resize(num_workers)
            self._units.resize(num_workers)
        self.wake()

    def wake(self) -> None:
        """Tell the fleet's thread that more units may start, or that other workers are wanted."""
        self._place.wake()

    def wait_for(self, attempt: Callable[[], Result | None]) -> Result:
        """Try after every change until there is a result; raise if the run has to end."""
        with self.changed:
            # The fleet's thread makes the next attempts (`_try_for_learner`), with the lock that it holds anyway: the
            # learner is woken up once, and not for every unit.
            self._attempt = attempt
            try:
                while True:
                    self.raise_failure()
                    result = attempt() if self._result is None else self._result
                    if result is not None:
                        return result
                    self.changed.wait()
            finally:
                self._attempt = self._result = None

    def raise_failure(self) -> None:
        """Raise what has ended the fleet, if anything has. The caller holds the lock."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
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
        except Exception as failure:  # it reaches the user through the next `wait_for`
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
                self._replace(report)
            else:
                self._fail_unit(report)
        self._start_due()
        self._start_and_retire()
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
        self._policy.delivered(worker.index)
        worker.units.remove(unit)
        worker.capacity = self._units.capacity(segment.seconds)
        self._unflushed.append(worker)

    def _grant(self) -> None:
        """Grant what may start, first to workers that hold the fewest units, so that none hoards what others could run.

        The caller holds the lock.
        """
        free = [
            worker
            for worker in self._workers
            if worker.is_ready and len(worker.units) < worker.capacity and self._may_grant(worker)
        ]
        for num_held in range(max((worker.capacity for worker in free), default=0)):
            for worker in free:
                if len(worker.units) == num_held < worker.capacity:
                    unit = worker.reserved_units.pop(0) if worker.reserved_units else self._scheduler.next()
                    if unit is not None:
                        worker.units.append(unit)
                        worker.grant(unit)
                        self._unflushed.append(worker)
        for worker in self._unflushed:
            worker.flush()
        self._unflushed.clear()

    def _may_grant(self, worker: WorkerHandle) -> bool:
        """A surplus worker gets nothing new, but what only it can run must still be run."""
        return bool(worker.reserved_units) or not self._is_surplus(worker)

    def _is_surplus(self, worker: WorkerHandle) -> bool:
        return worker.is_outdated or worker.index >= self.num_workers

    def _try_for_learner(self) -> None:
        """Wake the learner if what it waits for is there, and not for every unit of it. The caller holds the lock."""
        if self._attempt is not None and self._result is None:
            self._result = self._attempt()
            if self._result is not None:
                self.changed.notify_all()

    def _seconds_to_wait(self) -> float | None:
        """Return when there is something to do that nobody will report; None if there is nothing."""
        waits = [max(0.0, restart.due - time.monotonic()) for restart in self._restarts]
        seconds = self._scheduler.seconds_to_next()
        # A scheduler that counts time makes nobody wait but those who could take a unit.
        if seconds is not None and any(
            worker.is_ready and len(worker.units) < worker.capacity and not self._is_surplus(worker)
            for worker in self._workers
        ):
            waits.append(seconds)
        return min(waits, default=None)

    # ------------------------------------------------------------------------------------------ failures and restarts

    def _replace(self, report: WorkerLost) -> None:
        worker, failure = report
        self._tracks.set_state(worker.index, State.RESTARTING)
        pause = 0.0
        if failure is not None:
            pause = self._note_failure(worker.index, failure, self._units.suspects(worker, failure))
        with self.changed:
            self._remove(worker)
            reserved = self._units.give_back(worker, worker.units, failure)
        # A unit of it may have failed before: its pause ends with the worker.
        self._restarts = [restart for restart in self._restarts if restart.index != worker.index]
        self._restarts.append(PendingRestart(time.monotonic() + pause, worker.index, reserved))

    def _fail_unit(self, report: UnitFailed) -> None:
        """The unit is given back, and the worker gets no other before its pause is over."""
        worker, unit, failure, failed_worker = report
        pause = self._note_failure(failed_worker, failure, [unit])
        worker.units.remove(unit)
        with self.changed:
            self._units.give_back(worker, [unit], failure)
        if pause:
            worker.is_ready = False
            self._restarts.append(PendingRestart(time.monotonic() + pause, worker.index))

    def _note_failure(self, index: int, failure: Exception, suspects: list[int]) -> float:
        """Return the seconds that the worker pauses; raise when it has failed too often."""
        pause = self._policy.failed(index, failure, suspects)
        with self.changed:
            self._scheduler.totals.worker_restarts += 1
            self._scheduler.totals.segments_rejected += isinstance(failure, NotFinite)
        return max(pause, self._min_pause_seconds)

    def _start_due(self) -> None:
        """Start the workers whose pause is over."""
        if not self._restarts:
            return
        due = [restart for restart in self._restarts if _is_past(restart.due)]
        if self._place.starts_together and len(due) < len(self._restarts):
            return  # a pool begins when the longest pause is over, for none of its workers can start later
        for restart in due:
            self._restarts.remove(restart)
            alive = next((worker for worker in self._workers if worker.index == restart.index), None)
            if alive is not None:  # only a unit of it had failed
                alive.is_ready = True
            elif not (self._place.starts_together and restart.index >= self.num_workers):
                self._start_worker(restart.index).reserved_units = restart.reserved_units

    def _start_and_retire(self) -> None:
        """Come closer to the wanted workers. One is started at a time, so that the others need not wait for a reply."""
        # This runs for every batch of reports, so with a hundred workers the normal case must be cheap.
        if self._is_settled and not any(worker.is_outdated for worker in self._workers):
            return
        for worker in [worker for worker in self._workers if self._is_surplus(worker)]:
            if worker.is_ready and not (worker.units or worker.reserved_units):
                self._retire(worker)
        with self.changed:  # `resize` may be called meanwhile, and what it wants must not be overlooked
            taken = {worker.index for worker in self._workers} | {restart.index for restart in self._restarts}
            missing = [index for index in range(self.num_workers) if index not in taken]
            self._is_settled = not missing and not any(map(self._is_surplus, self._workers))
        if self._place.starts_together:
            missing = missing if not taken else []
        else:
            if len(missing) > 1:
                self.wake()  # for the next one
            missing = missing[:1]
        for index in missing:
            self._start_worker(index)

    def _retire(self, worker: WorkerHandle) -> None:
        with self.changed:
            self._remove(worker)
            self._units.worker_retired(worker.index)
        worker.retire()
        self._tracks.set_state(worker.index, State.PARKED)

    def _remove(self, worker: WorkerHandle) -> None:
        self._workers.remove(worker)
        self._is_settled = False
        # It may have reported something just before, and its connection is closed now.
        self._unflushed = [other for other in self._unflushed if other is not worker]

    def _start_worker(self, index: int) -> WorkerHandle:
        with self.changed:
            self._units.worker_starts(index)
        worker = self._place.start(index)
        worker.capacity = self._units.first_capacity
        self._workers.append(worker)
        self._is_settled = False
        return worker


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment
