"""`freerun replay`: the steps of a recorded run played again, by the weights that chose them and in their order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from freerun.collecting.rollouts.episode_numbers import NoNextEpisode, next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.core import SEGMENT_ARRAYS, Counts, Demand, EnvFactory, FloatArray, Policy, RunSeed, Segment, UserError

Pieces = list[list[list[int]]]
"""One recorded segment: for each of its columns, the [episode, number of steps, version] that follow one another."""


@dataclass(frozen=True)
class RecordedSegment:
    """A segment of environments that are tensors: their episodes have no numbers, but their segments have."""

    worker: int
    number: int
    num_steps: int
    versions_played: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """True if the simulator was new, at the beginning of the run or when it was resumed."""
        return len(self.versions_played) == self.number + 1


@dataclass(frozen=True)
class RecordedUpdate:
    """What one update learned from, as the ledger recorded it."""

    update: int
    progress: float
    segments: list[Pieces]
    tensors: tuple[RecordedSegment, ...] = ()
    """Instead of `segments`, where environments are tensors."""

    def versions(self) -> set[int]:
        """The versions of the weights that chose its actions."""
        return {version for columns in self.segments for column in columns for _, _, version in column}


class ReplayCollector:
    """A `Collector` that collects again what another run's collector has, in this process.

    An episode's randomness comes from its number alone, so the same weights make the same steps again. An episode that
    was handed over in several pieces keeps its environment from one piece to the next.
    """

    num_workers = 1

    def __init__(self, factory: EnvFactory, policy: Policy, run_seed: RunSeed, record: Sequence[RecordedUpdate]):
        self._factory = factory
        self._policy = copy.deepcopy(policy)  # the learner goes on with its own
        self._run_seed = run_seed
        self._record = record
        # Weights are kept as long as an update that is still to come needs them.
        self._weights: dict[int, FloatArray] = {}
        self._num_updates_to_come = Counter(version for update in record for version in update.versions())
        self._idle: list[Rollout] = []
        self._running: dict[int, Rollout] = {}  # by the number of the episode that it is in the middle of
        self._version = 0
        self._counts = Counts()

    def counts(self) -> Counts:
        return replace(self._counts)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._version = version
        if self._num_updates_to_come[version]:
            self._weights[version] = weights.copy()

    def collect(self, demand: Demand) -> list[Segment]:
        """The segments of the next recorded update, whatever the demand."""
        recorded = self._record[self._version]
        segments = [self._play_segment(columns) for columns in recorded.segments]
        for version in recorded.versions():
            self._num_updates_to_come[version] -= 1
            if not self._num_updates_to_come[version]:
                del self._weights[version]
        self._counts.steps_delivered += sum(segment.num_steps for segment in segments)
        return segments

    def _play_segment(self, columns: Pieces) -> Segment:
        return _joined([_joined([self._play(*piece) for piece in column], axis=0) for column in columns], axis=1)

    def _play(self, number: int, num_steps: int, version: int) -> Segment:
        """Some steps of one episode."""
        if version not in self._weights:
            raise UserError(f"the ledger is damaged: it names version {version} before that version exists")
        if number < 0:
            raise UserError("this run has dropped steps, and nothing records which weights chose them")
        rollout, to_begin = self._running.pop(number, None), []
        if rollout is None:
            self._counts.episodes_started += 1
            rollout, to_begin = self._idle.pop() if self._idle else self._make(), [number]
        rollout.load(self._weights[version], version)
        try:
            segment = next(rollout.segments(num_steps, next_from(to_begin))).copy()
        except NoNextEpisode:
            raise UserError(
                f"episode {number} ended earlier than it did in the recorded run: the environment is not the same, or "
                "something else than its seed decides what it does"
            ) from None
        if segment.ended[-1].any():
            self._idle.append(rollout)
        else:
            self._running[number] = rollout
        return segment

    def _make(self) -> Rollout:
        return Rollout(self._factory.make(1), self._policy, self._run_seed)

    def close(self) -> None:
        for rollout in (*self._idle, *self._running.values()):
            rollout.close()


def _joined(parts: list[Segment], axis: int) -> Segment:
    """Segments one after another (axis 0) or side by side (axis 1)."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis) for name in SEGMENT_ARRAYS}
    # What continues another part began with that part's memory.
    memories = [part.memory for part in (parts if axis else parts[:1]) if part.memory is not None]
    return Segment(**arrays, seconds=0.0, memory=np.concatenate(memories) if memories else None)
