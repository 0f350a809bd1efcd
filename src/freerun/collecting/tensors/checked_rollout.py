"""A rollout of tensors that is checked twice: for numbers that are not finite, and for a simulator that hangs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from freerun.collecting.tensors.simulator_watch import SimulatorWatch
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import Counts, FloatArray, NotFinite, Policy, Segment, TensorSegment

SOURCES = {
    "obs": "the simulator returned an observation",
    "action": "the policy chose an action",
    "log_prob": "the policy gave a log-probability",
    "reward": "the simulator returned a reward",
    "next_obs": "the simulator returned an observation",
}
"""The arrays that are checked and what wrote them, in the order in which they arise within a step."""


class CheckedRollout:
    """Hands over only finite segments.

    After a segment with a NaN or an infinity, the restart policy decides by --on-nan: either the run ends, or the
    segment is rejected and all environments begin new episodes. While it steps, a `SimulatorWatch` looks for a hang.
    """

    def __init__(
        self,
        rollout: TensorRollout,
        worker: int,
        restart_policy: RestartPolicy,
        watch: SimulatorWatch,
        reject: Callable[[TensorSegment], None],
    ):
        self.env = rollout.env
        self._rollout = rollout
        self._worker = worker
        self._restart_policy = restart_policy
        self._watch = watch
        self._reject = reject
        self._is_first = True

    def load(self, weights: FloatArray, version: int) -> None:
        self._rollout.load(weights, version)

    def collect(self) -> TensorSegment:
        while True:
            with self._watch.over(self._worker, self._rollout.heartbeat, self._is_first):
                segment = self._rollout.collect()
            self._is_first = False
            failure = find_not_finite(segment)
            if failure is None:
                self._restart_policy.delivered(self._worker)
                return segment
            self._restart_policy.failed(self._worker, failure)  # raises where the run is to end
            self._reject(segment)
            self._rollout.reset()

    def evaluate(self, policy: Policy, num_episodes: int) -> list[float]:
        """Play new episodes with another policy, whose returns these are; afterwards give all up and begin new ones."""
        with self._watch.over(self._worker, self._rollout.heartbeat, self._is_first):
            return self._rollout.evaluate(policy, num_episodes)

    @property
    def num_segments(self) -> int:
        return self._rollout.num_segments


def count_rejected(counts: Counts, segment: TensorSegment) -> None:
    """Count the episodes of a segment that is not handed over, after which all environments begin new ones."""
    num_given_up = int(segment.ended.sum()) + segment.reward.shape[1]
    counts.episodes_started += num_given_up
    counts.episodes_dropped += num_given_up
    counts.segments_rejected += 1


def find_not_finite(segment: TensorSegment) -> NotFinite | None:
    """An error about the first NaN or infinity of a segment; None if all numbers are finite.

    The device answers one question per segment, because each answer makes the host wait for the device. The place is
    searched for only if that answer is no.
    """
    floats = [name for name in SOURCES if getattr(segment, name).is_floating_point()]
    finite = [torch.isfinite(getattr(segment, name)) for name in floats]
    if bool(torch.stack([array.all() for array in finite]).all()):
        return None
    # Sorted by row, then by the order in which the numbers of one step arise.
    found = [(row, order, column) for order, array in enumerate(finite) for row, column in _first_false(array)]
    row, order, column = min(found)
    name = floats[order]
    # `episode_length` counts the step itself; an observation that the step led to belongs to the next one.
    step = int(segment.episode_length[row, column]) - (name != "next_obs")
    failure = NotFinite(
        f"{SOURCES[name]} that is not finite, at step {step} of an episode in environment {column} of "
        f"{segment.reward.shape[1]}"
    )
    failure.step = step
    failure.evidence = _evidence(segment, row, column)
    return failure


def _first_false(finite: Tensor) -> list[tuple[int, int]]:
    """Row and column of the first step with a number that is not finite; empty if there is none."""
    places = torch.nonzero(~finite.flatten(2).all(2) if finite.dim() > 2 else ~finite)
    return [(int(row), int(column)) for row, column in places[:1]]


def _evidence(segment: TensorSegment, row: int, column: int) -> Segment:
    """The steps of the episode up to that place, as far as this segment holds them."""
    ended = np.flatnonzero(segment.ended[:row, column].cpu().numpy())
    rows = slice(int(ended[-1]) + 1 if len(ended) else 0, row + 1)
    arrays = {
        name: getattr(segment, name)[rows, column : column + 1].cpu().numpy()
        for name in (*SOURCES, "terminated", "truncated")
    }
    shape = arrays["reward"].shape
    return Segment(
        **arrays, version=np.full(shape, segment.version), episode=np.full(shape, column), seconds=segment.seconds
    )
