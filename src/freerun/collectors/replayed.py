"""Steps played again as a ledger has recorded them: each by the weights that chose it then, in the order of then."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from freerun.collectors.rollout import Rollout, in_order
from freerun.core import SEGMENT_ARRAYS, Counts, Demand, EnvFactory, FloatArray, Policy, Segment, UserError

Pieces = list[list[list[int]]]
"""Of one segment: for each of its columns, the [episode, steps, version] that follow each other in it."""


@dataclass(frozen=True)
class Recorded:
    """What one update has learned from."""

    update: int
    progress: float
    segments: list[Pieces]

    def versions(self) -> set[int]:
        return {version for columns in self.segments for column in columns for _, _, version in column}


class Replayed:
    """A `Collector` that collects what another has: one environment after another, in this process.

    An episode's randomness is its own, so whoever plays it with the same weights gets the same steps. One that was
    handed over in pieces keeps its environment from one piece to the next.
    """

    num_workers = 1

    def __init__(self, factory: EnvFactory, policy: Policy, run_seed: int, record: Sequence[Recorded]):
        self._factory = factory
        self._policy = copy.deepcopy(policy)  # the learner goes on with the other
        self._run_seed = run_seed
        self._record = record
        self._weights: dict[int, FloatArray] = {}
        self._uses = Counter(version for update in record for version in update.versions())
        self._free: list[Rollout] = []
        self._running: dict[int, Rollout] = {}
        self._version = 0
        self._book = Counts()

    def counts(self) -> Counts:
        return replace(self._book)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._version = version
        if self._uses[version]:
            self._weights[version] = weights.copy()

    def collect(self, demand: Demand) -> list[Segment]:
        recorded = self._record[self._version]
        segments = [self._play(columns) for columns in recorded.segments]
        for version in recorded.versions():
            self._uses[version] -= 1
            if not self._uses[version]:
                del self._weights[version]
        self._book.steps_delivered += sum(segment.num_steps for segment in segments)
        return segments

    def _play(self, columns: Pieces) -> Segment:
        played = [_joined([self._piece(*piece) for piece in column], axis=0) for column in columns]
        return _joined(played, axis=1)

    def _piece(self, number: int, num_steps: int, version: int) -> Segment:
        if version not in self._weights:
            raise UserError(f"the ledger is damaged: it names version {version} before there was one")
        if number < 0:
            raise UserError("this run has dropped steps, and nobody knows by which weights they were chosen")
        rollout, begin = self._running.pop(number, None), []
        if rollout is None:
            self._book.episodes_started += 1
            rollout, begin = self._free.pop() if self._free else self._make(), [number]
        rollout.load(self._weights[version], version)
        try:
            segment = next(rollout.segments(num_steps, in_order(begin))).copy()
        except ValueError:  # there is no step to write down: the episode is over
            raise UserError(
                f"episode {number} ended earlier than it did then: the environment is not the same, or something else "
                "than its seed decides what it does"
            ) from None
        if segment.ended[-1].any():
            self._free.append(rollout)
        else:
            self._running[number] = rollout
        return segment

    def _make(self) -> Rollout:
        return Rollout(self._factory.make(1), self._policy, self._run_seed)

    def close(self) -> None:
        for rollout in (*self._free, *self._running.values()):
            rollout.close()


def _joined(parts: list[Segment], axis: int) -> Segment:
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis) for name in SEGMENT_ARRAYS}
    return Segment(**arrays, seconds=0.0)
