"""`freerun replay` of environments that are tensors: the simulators make the same segments again, one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from freerun.collecting.rollouts.replay_collector import RecordedSegment
from freerun.collecting.tensors.checked_rollout import find_not_finite
from freerun.collecting.tensors.tensor_rollout import TensorRollout, keep_for_current_stream
from freerun.core import Counts, Demand, FloatArray, TensorSegment, UserError

Record = Sequence[Sequence[RecordedSegment]]


class TensorReplay:
    """A `Collector` that collects again what another run's collector has, in this process.

    A simulator and its policy draw from generators that are seeded once. So a segment is the same again if the same
    weights have chosen all steps before it, also those that were dropped.
    """

    def __init__(self, make_rollouts: Callable[[], Sequence[TensorRollout]], record: Record):
        """`make_rollouts` makes new simulators, one for each worker of the run."""
        self._make_rollouts = make_rollouts
        self._record = record
        self._rollouts: dict[int, TensorRollout] = {}
        self._played: dict[tuple[int, int], TensorSegment] = {}  # by worker and number, until an update takes it
        # Weights and segments are kept as long as an update that is still to come needs them.
        self._last_use = {
            version: update
            for update, segments in enumerate(record)
            for segment in segments
            for version in segment.versions_played
        }
        self._num_to_take = Counter((one.worker, one.number) for segments in record for one in segments)
        self._weights: dict[int, FloatArray] = {}
        self._version = 0
        self._counts = Counts()
        self.num_workers = 1

    def counts(self) -> Counts:
        return replace(self._counts)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._version = version
        if version in self._last_use:
            self._weights[version] = weights.copy()

    def collect(self, demand: Demand) -> list[TensorSegment]:
        """The segments of the next recorded update, whatever the demand."""
        taken = [self._take(recorded) for recorded in self._record[self._version]]
        self._weights = {version: kept for version, kept in self._weights.items() if self._is_needed(version)}
        for segment in taken:
            keep_for_current_stream(segment)
            num_ended = int(segment.ended.sum())
            self._counts.episodes_started += num_ended
            self._counts.episodes_delivered += num_ended
            self._counts.steps_delivered += segment.num_steps
        return taken

    def _is_needed(self, version: int) -> bool:
        return self._last_use[version] > self._version

    def _take(self, recorded: RecordedSegment) -> TensorSegment:
        worker, place = recorded.worker, (recorded.worker, recorded.number)
        if recorded.is_first:
            self._begin(worker)
        for version in recorded.versions_played:
            self._play(worker, version)
        if place not in self._played or not self._num_to_take[place]:
            raise UserError(f"the ledger is damaged: segment {recorded.number} of simulator {worker} was never played")
        self._num_to_take[place] -= 1
        segment = self._played.pop(place)
        if segment.num_steps != recorded.num_steps:
            raise UserError(
                f"a segment had {recorded.num_steps} steps in this run and has {segment.num_steps} now: a run that was "
                "resumed with other --num-envs, --num-steps-per-env or --collection-batch-size cannot be replayed"
            )
        return segment

    def _begin(self, worker: int) -> None:
        """Make a new simulator for this worker."""
        made = self._make_rollouts()
        if worker >= len(made):
            raise UserError(
                f"the ledger names simulator {worker}, and the run has {len(made)}: a run that was resumed with fewer "
                "collectors cannot be replayed"
            )
        if worker in self._rollouts:
            self._rollouts[worker].env.close()
        self._rollouts[worker] = made[worker]
        self._played = {place: segment for place, segment in self._played.items() if place[0] != worker}
        for other in made:
            if other is not made[worker]:
                other.env.close()

    def _play(self, worker: int, version: int) -> None:
        """Make the simulator's next segment; keep it if an update will take it."""
        if version not in self._weights or worker not in self._rollouts:
            raise UserError(f"the ledger is damaged: it names version {version} before that version exists")
        rollout = self._rollouts[worker]
        rollout.load(self._weights[version], version)
        segment = rollout.collect()
        if find_not_finite(segment) is not None:
            rollout.reset()  # as in the run, which has rejected this segment
        elif self._num_to_take[worker, segment.number]:
            self._played[worker, segment.number] = segment

    def close(self) -> None:
        for rollout in self._rollouts.values():
            rollout.env.close()
