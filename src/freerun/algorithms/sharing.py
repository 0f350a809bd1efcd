"""Several learners, one update: each works on its share of the rows, and sums over all make it what one would do.

Every learner holds the same weights and draws the same random numbers; only the arithmetic is shared out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freerun.core import AnySegment, Peers, Segment


def portion(peers: Peers, num_rows: int) -> slice:
    """This learner's share of so many rows."""
    return slice(num_rows * peers.index // peers.count, num_rows * (peers.index + 1) // peers.count)


def average(peers: Peers, tensor: Tensor, share: float) -> None:
    """In place: the mean over all rows, from each learner's mean over its share of them."""
    if peers.count > 1:
        tensor.mul_(share)
        peers.sum(tensor)


def whole(peers: Peers, mine: Tensor, num_rows: int, dim: int = 0) -> Tensor:
    """All rows, from each learner's `portion` of them."""
    if peers.count == 1:
        return mine
    shape = list(mine.shape)
    shape[dim] = num_rows
    rows = torch.zeros(shape, dtype=mine.dtype, device=mine.device)
    here = portion(peers, num_rows)
    rows.narrow(dim, here.start, here.stop - here.start).copy_(mine)
    peers.sum(rows)
    return rows


def mean(rows: Tensor) -> Tensor:
    """Zero where a learner has none of the rows."""
    return rows.mean() if len(rows) else rows.sum()


def first_episode(segment: AnySegment) -> int:
    """By which segments of several learners are ordered; those of tensor environments have none."""
    return int(segment.episode[0, 0]) if isinstance(segment, Segment) else 0


class Size(NamedTuple):
    """Of a segment, and where it belongs in the joined batch."""

    episode: int
    """The number of its first."""
    learner: int
    num_steps: int


class JoinedRows:
    """A batch whose rows are spread over the learners, in the order in which one would have them: by episode."""

    def __init__(self, peers: Peers, sizes: Sequence[Size], device: torch.device):
        self._peers = peers
        self.total = sum(size.num_steps for size in sizes)
        if peers.count == 1:
            return
        places: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sizes)
        first = 0
        for index in sorted(range(len(sizes)), key=lambda index: sizes[index][:2]):
            places[index] = torch.arange(first, first + sizes[index].num_steps)
            first += sizes[index].num_steps
        mine = [place for place, size in zip(places, sizes, strict=True) if size.learner == peers.index]
        self._places = torch.cat([torch.empty(0, dtype=torch.int64), *mine]).to(device)
        self._local = torch.full((self.total,), -1, dtype=torch.int64, device=device)
        self._local[self._places] = torch.arange(len(self._places), device=device)

    def here(self, rows: Tensor) -> Tensor:
        """Which of these rows of the joined batch this learner has, as rows of its own batch."""
        if self._peers.count == 1:
            return rows
        local = self._local[rows]
        return local[local >= 0]

    def join(self, mine: Tensor) -> Tensor:
        """Values of all rows, [..., total], from those of this learner's."""
        if self._peers.count == 1:
            return mine
        joined = torch.zeros((*mine.shape[:-1], self.total), dtype=mine.dtype, device=mine.device)
        joined[..., self._places] = mine
        self._peers.sum(joined)
        return joined
