"""Which weights have chosen the steps of a simulator, also of those that nobody got: it takes this to replay a run."""

from __future__ import annotations

from dataclasses import replace

from freerun.core import TensorSegment


class SegmentHistory:
    """Notes the version of every segment that a simulator makes, and tells it with the segments that are handed over.

    A simulator goes on from where it is, so whoever plays a segment again must play all segments before it.
    """

    def __init__(self, num_workers: int):
        self._versions: list[list[int]] = [[] for _ in range(num_workers)]  # by worker: those not told yet
        self._num_told = [0] * num_workers

    def note(self, segment: TensorSegment) -> None:
        """Note a segment as it is made: to be handed over, or rejected."""
        self._versions[segment.worker].append(segment.version)

    def tell(self, segment: TensorSegment) -> TensorSegment:
        """Return a segment that is handed over now, with what was played since the last one."""
        worker = segment.worker
        num_new = max(0, segment.number + 1 - self._num_told[worker])
        versions = self._versions[worker]
        told, self._versions[worker] = versions[:num_new], versions[num_new:]
        self._num_told[worker] += num_new
        return replace(segment, versions_played=tuple(told))
