"""Windows: from what a run shows of itself, moment by moment, to observations that may be compared.

Where updates follow each other quickly, a window reaches from one to another, so that it holds whole turns of the loop
and no part of one. Where the learner waits most of the time, data flows evenly and any moment will do.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from freerun.adapting.observation import Observation
from freerun.core import State

ENOUGH_UPDATES = 5
FEWEST_UPDATES = 3
ENOUGH_UNITS = 6
"""Of which a rate can be told, where they come one by one."""
NUM_PIECES = 4
LONGEST = 4.0
"""A window that is this many times as long as it should be ends, whatever it holds."""


@dataclass(frozen=True)
class Sample:
    """A run at a moment; all but the fills are totals."""

    at: float
    """Seconds, by any clock."""
    steps: int
    """That have arrived."""
    units: int
    """Episodes or segments that have arrived, where a mode counts them."""
    dropped: int
    learner_seconds: Sequence[float]
    """In each state."""
    worker_seconds: Sequence[float]
    """In each state, over all workers."""
    cpu: float
    queue_fill: float | None = None


@dataclass(frozen=True)
class Update:
    at: float
    steps: int
    """Trained so far."""
    lag: float
    buffer_fill: float | None


class Window:
    """Grows until it is long enough to say something."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._samples: list[Sample] = []
        self._updates: list[Update] = []

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def update(self, update: Update) -> None:
        if self._samples:
            self._updates.append(update)

    def close(self) -> Observation | None:
        """What was seen, once it is enough."""
        if len(self._samples) < 3:
            return None
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at
        if seconds < self._seconds:
            return None
        is_overdue = seconds >= LONGEST * self._seconds
        waiting = _spent(first.learner_seconds, last.learner_seconds, State.WAITING_FOR_DATA) / seconds
        num_updates = len(self._updates)
        if num_updates >= ENOUGH_UPDATES or (is_overdue and num_updates >= FEWEST_UPDATES):
            return self._observed([(update.at, update.steps) for update in self._updates])
        units = last.units - first.units
        flows = waiting > 0.5 and (units >= ENOUGH_UNITS or not last.units)
        if flows or is_overdue:
            return self._observed(spaced([(sample.at, sample.steps) for sample in self._samples]))
        return None

    def _observed(self, points: Sequence[tuple[float, int]]) -> Observation:
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at
        rate, noise = rate_of(points)
        of_workers = {
            state: _spent(first.worker_seconds, last.worker_seconds, state)
            for state in (State.BUSY, State.WAITING_FOR_SLOT, State.WAITING_FOR_WEIGHTS)
        }
        total = sum(of_workers.values())
        shares = {state: spent / total if total > 0 else 0.0 for state, spent in of_workers.items()}
        fills = [sample.queue_fill for sample in self._samples if sample.queue_fill is not None]
        collected = last.steps - first.steps + last.dropped - first.dropped
        return Observation(
            seconds=seconds,
            steps_per_second=rate,
            noise=noise,
            learner_waiting=min(
                1.0, _spent(first.learner_seconds, last.learner_seconds, State.WAITING_FOR_DATA) / seconds
            ),
            workers_busy=shares[State.BUSY] if total > 0 else 1.0,
            workers_waiting_for_slot=shares[State.WAITING_FOR_SLOT],
            workers_waiting_for_weights=shares[State.WAITING_FOR_WEIGHTS],
            cpu=statistics.fmean(sample.cpu for sample in self._samples),
            queue_fill=statistics.fmean(fills) if fills else None,
            dropped=(last.dropped - first.dropped) / collected if collected > 0 else 0.0,
            buffer_fill=self._updates[-1].buffer_fill if self._updates else None,
            lag=statistics.fmean(update.lag for update in self._updates) if self._updates else 0.0,
        )


def _spent(before: Sequence[float], after: Sequence[float], state: State) -> float:
    return max(0.0, after[state] - before[state])


def spaced(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Some of many points, evenly. Steps come an episode at a time: pieces that hold none or one of them would tell of
    that and not of the rate."""
    last = len(points) - 1
    return [points[round(place * last / NUM_PIECES)] for place in range(NUM_PIECES + 1)]


def rate_of(points: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Steps per second over (moment, steps so far), and the standard error of that as a share of it.

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
    # A ratio's standard error: what is left of each piece beside the mean rate.
    left = sum((num_steps - rate * length) ** 2 for length, num_steps in pieces)
    error = math.sqrt(left * len(pieces) / (len(pieces) - 1)) / seconds
    return rate, error / rate
