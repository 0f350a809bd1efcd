"""The learner's side of every mode that collects while the learner updates: a scheduler over a fleet of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.collecting.scheduling.scheduler import BoundedScheduler, Scheduler, queue_size_tunable
from freerun.collecting.scheduling.units import Units
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.worker_handle import WorkerPlace
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

SWITCH_SECONDS = 0.0001
"""How long another thread waits for the interpreter while the learner updates. The fleet's thread waits several times
for every unit, and a worker waits with it, so Python's own 5 ms would add up."""
SEGMENT_STEPS_FACTOR = 4
"""--adapt may make segments this many times longer or shorter than configured."""


class SegmentPlace(Protocol):
    """A place whose workers hand over segments of a length that can be changed."""

    segment_steps: int


class AsyncCollector:
    """A `Collector` made of a scheduler, which decides what may start, and a fleet of workers, which plays it.

    A mode chooses the two, and where its workers live, in its constructor.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        options: ModeOptions,
        scheduler: Scheduler,
        units: Units,
        place: WorkerPlace,
    ):
        self._options = options
        self._max_workers = settings.max_workers
        self._bounds: TuningBounds | None = settings.tuning_bounds
        self._scheduler = scheduler
        self._units = units
        self._place = place
        self.fleet = WorkerFleet(settings, scheduler, units, place)
        self._own_tunables: list[Tunable] = []  # what a mode lets --adapt change besides the number of workers
        # The interval belongs to the whole process, which may go on without us: `close` sets the old one again.
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self.fleet.start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self.fleet.wait_until_ready()

    @property
    def num_workers(self) -> int:
        return self.fleet.num_workers

    def counts(self) -> Counts:
        with self.fleet.changed:
            counts = self._scheduler.counts()
        # Heartbeats need no lock, and summing up those of a hundred workers would hold up the fleet's thread.
        return replace(counts, step_calls=self._place.num_step_calls())

    def publish(self, weights: FloatArray, version: int) -> None:
        # First the weights, then the version that grants units: no unit may start with weights that are too old.
        self._place.publish(weights, version)
        with self.fleet.changed:
            self._scheduler.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if not demand:
            with self.fleet.changed:
                self.fleet.raise_failure()
                segments = self._scheduler.take_arrived()
            if segments:
                self.fleet.wake()  # what was taken makes room for more
            return without_resting_rows(segments)
        self._options.check(demand)
        with self.fleet.changed:
            self._scheduler.open(demand)
        self.fleet.wake()
        return without_resting_rows(self.fleet.wait_for(self._scheduler.take))

    def renew(self, start: StartPoint) -> None:
        """Begin another training with the same workers."""
        with self.fleet.changed:
            self._units.renew(start)

    def close(self) -> None:
        sys.setswitchinterval(self._switch_interval)
        self.fleet.close()

    # ------------------------------------------------------------------------------------------ what --adapt may change

    def tunables(self) -> list[Tunable]:
        """The number of workers, and what the mode adds.

        Workers are started, or let go when they have nothing left to do: nothing is lost.
        """
        if self._max_workers == 1:
            return self._own_tunables
        read, apply = lambda: self.num_workers, lambda value: self.fleet.resize(int(value))
        workers = Tunable("num_workers", read, apply, 1.0, self._max_workers, is_settled=self.fleet.is_complete)
        return [workers, *self._own_tunables]

    def _queue_tunable(self, queue: BoundedScheduler) -> Tunable:
        def resize(queue_size: int) -> None:
            with self.fleet.changed:
                queue.resize(queue_size)
            self.fleet.wake()

        return queue_size_tunable(lambda: queue.queue_size or 0, resize, self._bounds)

    def _segment_tunable(
        self, place: SegmentPlace, note: Callable[[int], None] = lambda segment_steps: None
    ) -> Tunable:
        """The steps of every environment that are handed over at a time. `note` is called with the lock held."""

        def apply(value: float) -> None:
            with self.fleet.changed:
                place.segment_steps = int(value)
                note(int(value))

        configured = place.segment_steps
        low, high = max(1.0, configured // SEGMENT_STEPS_FACTOR), configured * SEGMENT_STEPS_FACTOR
        return Tunable("collection_batch", lambda: place.segment_steps, apply, low, high)
