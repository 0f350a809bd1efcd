"""Several learners that make one update together.

Each learner computes on its share of the rows, and sums over all learners give what a single learner would have got.
Every learner holds the same weights and draws the same random numbers; only the arithmetic is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freerun.core import AnySegment, LearnerGroup, Segment


def share_of_rows(group: LearnerGroup, num_rows: int) -> slice:
    """This learner's share of `num_rows` rows that all learners have."""
    return slice(num_rows * group.index // group.count, num_rows * (group.index + 1) // group.count)


def average_over_learners_(group: LearnerGroup, tensor: Tensor, share: float) -> None:
    """Turn the mean over this learner's share of the rows into the mean over all rows, in place."""
    # mean = sum_k (n_k / n) * mean_k, where share = n_k / n
    if group.count > 1:
        tensor.mul_(share)
        group.sum(tensor)


def join_shares(group: LearnerGroup, mine: Tensor, num_rows: int, dim: int = 0) -> Tensor:
    """All rows, from the `share_of_rows` of each learner."""
    if group.count == 1:
        return mine
    shape = list(mine.shape)
    shape[dim] = num_rows
    # A sum of tensors that are zero outside one's own share is exact, and the only operation a group needs.
    rows = torch.zeros(shape, dtype=mine.dtype, device=mine.device)
    share = share_of_rows(group, num_rows)
    rows.narrow(dim, share.start, share.stop - share.start).copy_(mine)
    group.sum(rows)
    return rows


def mean_or_zero(rows: Tensor) -> Tensor:
    """The mean, or 0 where a learner has none of the rows."""
    return rows.mean() if len(rows) else rows.sum()


def first_episode(segment: AnySegment) -> int:
    """The number of a segment's first episode, by which the segments of several learners are ordered.

    Episodes of tensor environments have no numbers.
    """
    return int(segment.episode[0, 0]) if isinstance(segment, Segment) else 0


class SegmentSize(NamedTuple):
    """How many rows of the joined batch a segment takes, whose they are, and how they are ordered."""

    episode: int
    """The number of the segment's first episode."""
    learner: int
    num_steps: int


class JoinedRows:
    """The numbering of a batch whose rows are spread over the learners.

    Rows are ordered by episode, as a single learner would have them.
    """

    def __init__(self, group: LearnerGroup, sizes: Sequence[SegmentSize], device: torch.device):
        self._group = group
        self.total = sum(size.num_steps for size in sizes)
        if group.count == 1:
            return
        places: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sizes)
        first = 0
        # By (episode, learner).
        for index in sorted(range(len(sizes)), key=lambda index: sizes[index][:2]):
            places[index] = torch.arange(first, first + sizes[index].num_steps)
            first += sizes[index].num_steps
        mine = [place for place, size in zip(places, sizes, strict=True) if size.learner == group.index]
        # Both directions of the map between this learner's rows and those of the joined batch; -1 is another learner's.
        self._joined_of_local = torch.cat([torch.empty(0, dtype=torch.int64), *mine]).to(device)
        self._local_of_joined = torch.full((self.total,), -1, dtype=torch.int64, device=device)
        self._local_of_joined[self._joined_of_local] = torch.arange(len(self._joined_of_local), device=device)

    def local(self, rows: Tensor) -> Tensor:
        """Those of the given rows of the joined batch that this learner has, as rows of its own batch."""
        if self._group.count == 1:
            return rows
        local = self._local_of_joined[rows]
        return local[local >= 0]

    def joined(self, rows: Tensor) -> Tensor:
        """Rows of this learner's batch, as rows of the joined batch."""
        return rows if self._group.count == 1 else self._joined_of_local[rows]

    def join(self, mine: Tensor) -> Tensor:
        """Values of all rows, [..., total], from the values of this learner's rows."""
        if self._group.count == 1:
            return mine
        joined = torch.zeros((*mine.shape[:-1], self.total), dtype=mine.dtype, device=mine.device)
        joined[..., self._joined_of_local] = mine
        self._group.sum(joined)
        return joined
