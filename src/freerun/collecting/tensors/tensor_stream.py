"""`continuous` for environments that are tensors: simulators that never wait, and a queue that drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from freerun.collecting.scheduling.importance_queue import LengthRarity
from freerun.collecting.tensors.tensor_drops import EpisodeEnds
from freerun.collecting.tensors.tensor_modes import QueueConfig, TensorBatch
from freerun.core import CollectorSettings, Policy, TensorEnv, TensorSegment

REFRESH_SECONDS = 0.05
"""While the queue is full, `continuous` replaces its oldest segment this often, so that what the learner finds is new.
More often would only take the device away from the learner."""


class PriorityConfig(QueueConfig, Protocol):
    @property
    def queue_priority(self) -> str: ...


class TensorStream(TensorBatch):
    """Collects without ever waiting for the learner. A full queue drops the least important segment, or the oldest."""

    def __init__(self, envs: Sequence[TensorEnv], policy: Policy, settings: CollectorSettings, config: PriorityConfig):
        super().__init__(envs, policy, settings, config)
        self._rarity = LengthRarity() if config.queue_priority == "rare-lengths" else None
        self._rate: Callable[[TensorSegment], float] | None = None

    def prefer(self, importance: Callable[[TensorSegment], float]) -> None:
        """Keep the most important segments. The function is called in the simulator's thread."""
        self._rate = importance

    def _importance(self, segment: TensorSegment) -> float:
        if self._rarity is not None:
            return self._rarity.note(segment.episode_length[segment.ended].tolist())
        return 0.0 if self._rate is None else self._rate(segment)

    def _put(self, segment: TensorSegment) -> None:
        super()._put(segment)
        with self._changed:
            self._drop_excess()

    def _resize_queue(self, queue_size: int) -> None:
        with self._changed:
            super()._resize_queue(queue_size)
            self._drop_excess()

    def _drop_excess(self) -> None:
        while len(self._queue) > self._queue_size:
            segment = self._queue.drop_least().item
            ended = EpisodeEnds.of(segment)
            self._counts.episodes_started += len(ended.env)
            self._counts.episodes_dropped += len(ended.env)
            self._drops.note(segment, ended, is_dropped=True)

    def _hand_over(self, segment: TensorSegment) -> TensorSegment:
        segment, ended = super()._hand_over(segment), EpisodeEnds.of(segment)
        with self._changed:
            self._drops.note(segment, ended, is_dropped=False)
        return segment

    def _wait_until_allowed(self, num_segments: int, evaluates: bool) -> None:
        """Wait for the first weights; then, while the queue is full, for a short time only."""
        self._changed.wait_for(lambda: self._newest_weights is not None or self._ended)
        self._changed.wait_for(lambda: len(self._queue) < self._queue_size or self._ended, REFRESH_SECONDS)
