"""Windows: from momentary samples of a run to observations that may be compared.

Where updates follow each other quickly, a window reaches from one update to another, so that it holds whole cycles of
the training loop. Where the learner waits most of the time, data flows evenly and a window may end at any moment.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from freerun.core import State
from freerun.tuning.observation import Observation

ENOUGH_UPDATES = 5
MIN_UPDATES = 3
"""Enough for a window that is overdue."""
ENOUGH_UNITS = 6
"""Fewer episodes or segments do not give a rate."""
NUM_PIECES = 4
"""A window without enough updates is cut into this many pieces, to see how much the rate varies."""
MAX_STRETCH = 4.0
"""A window that is this many times as long as it should be ends, whatever it holds."""


@dataclass(frozen=True)
class RunSample:
    """A run at one moment. All fields but the fill and the CPU share are totals since the start."""

    at: float
    """Seconds, by any clock."""
    steps: int
    """Steps that have arrived."""
    units: int
    """Episodes or segments that have arrived, where a mode counts them."""
    dropped: int
    learner_seconds: Sequence[float]
    """The learner's seconds in each state."""
    worker_seconds: Sequence[float]
    """The seconds of all workers in each state."""
    cpu: float
    queue_fill: float | None = None


@dataclass(frozen=True)
class UpdateSample:
    """One update."""

    at: float
    steps: int
    """Steps trained so far."""
    lag: float
    buffer_fill: float | None


class Window:
    """Grows until it is long enough to say something."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._samples: list[RunSample] = []
        self._updates: list[UpdateSample] = []

    def add(self, sample: RunSample) -> None:
        self._samples.append(sample)

    def update(self, update: UpdateSample) -> None:
        if self._samples:
            self._updates.append(update)

    def close(self) -> Observation | None:
        """The observation of this window, or None while it holds too little."""
        if len(self._samples) < 3:
            return None
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at
        if seconds < self._seconds:
            return None
        is_overdue = seconds >= MAX_STRETCH * self._seconds
        num_updates = len(self._updates)
        if num_updates >= ENOUGH_UPDATES or (is_overdue and num_updates >= MIN_UPDATES):
            return self._observation([(update.at, update.steps) for update in self._updates])
        waiting = _spent(first.learner_seconds, last.learner_seconds, State.WAITING_FOR_DATA) / seconds
        num_units = last.units - first.units
        # A learner that waits most of the time takes at once what arrives, so the workers alone set the rate. Where a
        # mode counts no units (0 so far), there cannot be too few of them.
        flows_evenly = waiting > 0.5 and (num_units >= ENOUGH_UNITS or not last.units)
        if flows_evenly or is_overdue:
            return self._observation(evenly_spaced([(sample.at, sample.steps) for sample in self._samples]))
        return None

    def _observation(self, points: Sequence[tuple[float, int]]) -> Observation:
        """The means over this window; its rate is measured over these (moment, steps so far)."""
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at
        rate, noise = rate_of(points)
        # Parked workers do not count: a share is one of the time in these three states.
        worker_seconds = {
            state: _spent(first.worker_seconds, last.worker_seconds, state)
            for state in (State.BUSY, State.WAITING_FOR_SLOT, State.WAITING_FOR_WEIGHTS)
        }
        total = sum(worker_seconds.values())
        shares = {state: spent / total if total > 0 else 0.0 for state, spent in worker_seconds.items()}
        waiting = _spent(first.learner_seconds, last.learner_seconds, State.WAITING_FOR_DATA) / seconds
        fills = [sample.queue_fill for sample in self._samples if sample.queue_fill is not None]
        num_dropped = last.dropped - first.dropped
        num_collected = last.steps - first.steps + num_dropped
        return Observation(
            seconds=seconds,
            steps_per_second=rate,
            noise=noise,
            learner_waiting=min(1.0, waiting),
            workers_busy=shares[State.BUSY] if total > 0 else 1.0,
            workers_waiting_for_slot=shares[State.WAITING_FOR_SLOT],
            workers_waiting_for_weights=shares[State.WAITING_FOR_WEIGHTS],
            cpu=statistics.fmean(sample.cpu for sample in self._samples),
            queue_fill=statistics.fmean(fills) if fills else None,
            dropped=num_dropped / num_collected if num_collected > 0 else 0.0,
            buffer_fill=self._updates[-1].buffer_fill if self._updates else None,
            lag=statistics.fmean(update.lag for update in self._updates) if self._updates else 0.0,
        )


def _spent(before: Sequence[float], after: Sequence[float], state: State) -> float:
    return max(0.0, after[state] - before[state])


def evenly_spaced(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """A few of many points. Steps arrive an episode at a time, so that shorter pieces would hold none or one episode:
    their variation would say nothing about the rate."""
    last = len(points) - 1
    return [points[round(place * last / NUM_PIECES)] for place in range(NUM_PIECES + 1)]


def rate_of(points: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Steps per second over (moment, steps so far), and the standard error of the rate as a share of it.

    A piece that is twice as long counts twice: pieces differ in length where updates do.
    """
    (start, before), (stop, after) = points[0], points[-1]
    seconds = stop - start
    rate = (after - before) / seconds if seconds > 0 else 0.0
    pieces = [
        (later - earlier, steps - fewer)
        for (earlier, fewer), (later, steps) in itertools.pairwise(points)
        if later > earlier
    ]
    if rate <= 0 or len(pieces) < 2:
        return rate, 0.0
    # Standard error of a ratio over n pieces: sqrt(n / (n - 1) * sum_k (steps_k - rate * seconds_k)^2) / seconds
    residuals = sum((num_steps - rate * length) ** 2 for length, num_steps in pieces)
    error = math.sqrt(residuals * len(pieces) / (len(pieces) - 1)) / seconds
    return rate, error / rate
