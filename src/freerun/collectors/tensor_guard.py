"""What stands around every rollout of tensors: somebody looks at its numbers, and somebody at its clock."""

from __future__ import annotations

from collections.abc import Callable

from freerun.collectors.supervision import Supervisor
from freerun.collectors.tensor_finite import find_not_finite
from freerun.collectors.tensor_rollout import TensorRollout
from freerun.collectors.tensor_watch import SimulatorWatch
from freerun.core import Counts, FloatArray, TensorSegment


class Guarded:
    """A rollout whose segments are finite, or which says so and begins anew, or ends the run (--on-nan)."""

    def __init__(
        self,
        rollout: TensorRollout,
        place: int,
        supervisor: Supervisor,
        watch: SimulatorWatch,
        reject: Callable[[int, TensorSegment], None],
    ):
        self.env = rollout.env
        self._rollout = rollout
        self._place = place
        self._supervisor = supervisor
        self._watch = watch
        self._reject = reject
        self._is_first = True

    def load(self, weights: FloatArray, version: int) -> None:
        self._rollout.load(weights, version)

    def collect(self) -> TensorSegment:
        while True:
            with self._watch.over(self._place, self._rollout.vitals, self._is_first):
                segment = self._rollout.collect()
            self._is_first = False
            failure = find_not_finite(segment)
            if failure is None:
                self._supervisor.delivered(self._place)
                return segment
            self._supervisor.failed(self._place, failure)
            self._reject(self._place, segment)
            self._rollout.begin_anew()


def reject(book: Counts, place: int, segment: TensorSegment) -> None:
    """Nothing of it is handed over, and all environments begin new episodes."""
    num_given_up = int(segment.ended.sum()) + segment.reward.shape[1]
    book.episodes_started += num_given_up
    book.episodes_dropped += num_given_up
    book.segments_rejected += 1
    book.steps_dropped += segment.num_steps
    book.steps_dropped_by_worker[place] = book.steps_dropped_by_worker.get(place, 0) + segment.num_steps
