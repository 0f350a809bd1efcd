"""Which workers a fleet has: the roster starts them, lets surplus ones go, and replaces those that fail."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from freerun.collecting.scheduling.scheduler import Scheduler
from freerun.collecting.scheduling.units import Units
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.collecting.workers.worker_handle import UnitFailed, WorkerHandle, WorkerLost, WorkerPlace
from freerun.core import CollectorSettings, NotFinite, State

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


class WorkerRoster:
    """The workers that are there, those that are wanted, and those that wait for their restart.

    Once the fleet's thread runs, it alone starts and removes workers. `changed` is the fleet's lock.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        scheduler: Scheduler,
        units: Units,
        place: WorkerPlace,
        changed: threading.Condition,
    ):
        self.num_workers = settings.num_workers
        """The number of workers that the fleet should have."""
        self.policy = RestartPolicy(settings, units.failure_rules)
        self._changed = changed
        self._scheduler = scheduler
        self._units = units
        self._place = place
        self._tracks = settings.tracks
        self._min_pause_seconds = 0.0 if settings.tuning_bounds is None else MIN_PAUSE_SECONDS_ADAPTING
        self._workers: list[WorkerHandle] = []
        self._restarts: list[PendingRestart] = []
        self._is_settled = False  # the wanted workers are there, or will be when their pause is over

    # ------------------------------------------------------------------------------------------ any thread

    def workers(self) -> list[WorkerHandle]:
        """Return the workers that are there now. The copy may be used in any thread."""
        return list(self._workers)

    def num_ready(self) -> int:
        return sum(worker.is_ready for worker in self.workers())

    def is_complete(self) -> bool:
        """True when exactly the wanted workers are ready."""
        workers = self.workers()
        return len(workers) == self.num_workers and all(
            worker.is_ready and not self.is_surplus(worker) for worker in workers
        )

    def is_surplus(self, worker: WorkerHandle) -> bool:
        return worker.is_outdated or worker.index >= self.num_workers

    def resize(self, num_workers: int) -> None:
        """Want another number of workers from now on. The caller holds the lock."""
        self.num_workers = num_workers
        self._is_settled = False
        self._place.resize(num_workers)
        self._units.resize(num_workers)

    # ------------------------------------------------------------------------------------------ the fleet's thread

    def start_all(self) -> None:
        """Start the first workers; they report when they are ready."""
        for index in range(self.num_workers):
            self._start(index)

    def free_workers(self) -> list[WorkerHandle]:
        """Return the workers that may be granted another unit."""
        # A surplus worker gets nothing new, but what only it can run must still be run.
        return [
            worker
            for worker in self._workers
            if worker.is_ready
            and len(worker.units) < worker.capacity
            and (worker.reserved_units or not self.is_surplus(worker))
        ]

    def seconds_to_restart(self) -> float | None:
        """Return the time until a worker is due to start; None if none waits for that."""
        return min((max(0.0, restart.due - time.monotonic()) for restart in self._restarts), default=None)

    def replace(self, report: WorkerLost) -> None:
        """Plan the restart of a worker that is gone."""
        worker, failure = report
        self._tracks.set_state(worker.index, State.RESTARTING)
        pause = 0.0
        if failure is not None:
            pause = self._note_failure(worker.index, failure, self._units.suspects(worker, failure))
        with self._changed:
            self._remove(worker)
            reserved = self._units.give_back(worker, worker.units, failure)
        # A unit of it may have failed before: its pause ends with the worker.
        self._restarts = [restart for restart in self._restarts if restart.index != worker.index]
        self._restarts.append(PendingRestart(time.monotonic() + pause, worker.index, reserved))

    def fail_unit(self, report: UnitFailed) -> None:
        """The unit is given back, and the worker gets no other before its pause is over."""
        worker, unit, failure, failed_worker = report
        pause = self._note_failure(failed_worker, failure, [unit])
        worker.units.remove(unit)
        with self._changed:
            self._units.give_back(worker, [unit], failure)
        if pause:
            worker.is_ready = False
            self._restarts.append(PendingRestart(time.monotonic() + pause, worker.index))

    def _note_failure(self, index: int, failure: Exception, suspects: list[int]) -> float:
        """Return the seconds that the worker pauses; raise when it has failed too often."""
        pause = self.policy.failed(index, failure, suspects)
        with self._changed:
            self._scheduler.totals.worker_restarts += 1
            self._scheduler.totals.segments_rejected += isinstance(failure, NotFinite)
        return max(pause, self._min_pause_seconds)

    def start_due(self) -> None:
        """Start the workers whose pause is over."""
        if not self._restarts:
            return
        due = [restart for restart in self._restarts if time.monotonic() >= restart.due]
        if self._place.starts_together and len(due) < len(self._restarts):
            return  # a pool begins when the longest pause is over, for none of its workers can start later
        for restart in due:
            self._restarts.remove(restart)
            alive = next((worker for worker in self._workers if worker.index == restart.index), None)
            if alive is not None:  # only a unit of it had failed
                alive.is_ready = True
            elif not (self._place.starts_together and restart.index >= self.num_workers):
                self._start(restart.index).reserved_units = restart.reserved_units

    def start_and_retire(self) -> bool:
        """Come closer to the wanted workers; return True if more must be started in the next turn.

        One is started at a time, so that the others need not wait for a reply."""
        # This runs for every batch of reports, so with a hundred workers the normal case must be cheap.
        if self._is_settled and not any(worker.is_outdated for worker in self._workers):
            return False
        for worker in [worker for worker in self._workers if self.is_surplus(worker)]:
            if worker.is_ready and not (worker.units or worker.reserved_units):
                self._retire(worker)
        with self._changed:  # `resize` may be called meanwhile, and what it wants must not be overlooked
            taken = {worker.index for worker in self._workers} | {restart.index for restart in self._restarts}
            missing = [index for index in range(self.num_workers) if index not in taken]
            self._is_settled = not missing and not any(map(self.is_surplus, self._workers))
        if self._place.starts_together and taken:
            return False
        for index in missing if self._place.starts_together else missing[:1]:
            self._start(index)
        return not self._place.starts_together and len(missing) > 1

    def _start(self, index: int) -> WorkerHandle:
        with self._changed:
            self._units.worker_starts(index)
        worker = self._place.start(index)
        worker.capacity = self._units.first_capacity
        self._workers.append(worker)
        self._is_settled = False
        return worker

    def _retire(self, worker: WorkerHandle) -> None:
        with self._changed:
            self._remove(worker)
            self._units.worker_retired(worker.index)
        worker.retire()
        self._tracks.set_state(worker.index, State.PARKED)

    def _remove(self, worker: WorkerHandle) -> None:
        self._workers.remove(worker)
        worker.is_gone = True
        self._is_settled = False
