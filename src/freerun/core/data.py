"""What travels between environments, workers and the learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # workers do without torch
    from torch import Tensor


Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Metrics = dict[str, float]


@dataclass
class Segment:
    """Consecutive steps of B environments, arrays shaped [T, B, ...]; an episode is a segment with B = 1."""

    obs: Array
    action: Array
    log_prob: FloatArray
    """Under the weights that chose the action (the behaviour policy)."""
    reward: FloatArray
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next_obs: Array
    """The true successor; never the first observation of another episode."""
    version: NDArray[np.int64]
    episode: NDArray[np.int64]
    """Its number; −1 − number where steps of the episode are missing before this one (a queue has dropped them, or
    hands them over later), so that nobody takes its return and length for those of a whole one."""
    seconds: float
    """Wall time that the worker spent on it."""

    @property
    def num_steps(self) -> int:
        return int(self.reward.size)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated

    def copy(self) -> Segment:
        """Arrays of its own, for a segment whose arrays will be overwritten."""
        arrays = {name: getattr(self, name).copy() for name in SEGMENT_ARRAYS}
        return Segment(**arrays, seconds=self.seconds)

    def part(self, start: int, stop: int, column: int) -> Segment:
        """Some steps of one lane, in arrays of their own."""
        arrays = {name: getattr(self, name)[start:stop, column : column + 1].copy() for name in SEGMENT_ARRAYS}
        return Segment(**arrays, seconds=self.seconds)


SEGMENT_ARRAYS = tuple(field.name for field in fields(Segment) if field.name != "seconds")


@dataclass
class TensorSegment:
    """The same from environments that are tensors, [T, N, ...] on their device; one version chose all its actions."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Tensor
    episode_return: Tensor
    """Of the episode up to and including each step."""
    episode_length: Tensor
    version: int
    seconds: float

    @property
    def num_steps(self) -> int:
        return self.reward.numel()

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


AnySegment = Segment | TensorSegment


@dataclass(frozen=True)
class Demand:
    """What an algorithm needs before its next update; empty means "update now".

    Given both, so many episodes are what the steps have been found to come to.
    """

    episodes: int = 0
    steps: int = 0
    whole_episodes: bool = True
    """Where False, parts of episodes will do: what is missing of them comes with later demands."""
    next_steps: int | None = None
    """Steps of the next demand, where it is known to be another: so much may be collected ahead for each update of
    allowed lag."""

    def __bool__(self) -> bool:
        return self.episodes > 0 or self.steps > 0


class Ring:
    """Rows in the order they came, of which the last `capacity` are there: as part of a state, only new ones are kept.

    `columns` are arrays or tensors [capacity, ...] in which row n lies at n % capacity.
    """

    def __init__(self, columns: Mapping[str, Any], total: int):
        self.columns = columns
        self.total = total
        """Rows that ever came."""
        self.capacity = len(next(iter(columns.values())))

    @property
    def first(self) -> int:
        """The oldest row that is there."""
        return max(0, self.total - self.capacity)

    def pieces(self, first: int | None = None, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows from `first` to `stop`, oldest first, as the number of a piece's first row and its columns."""
        first, stop = self.first if first is None else first, self.total if stop is None else stop
        while first < stop:
            place = first % self.capacity
            num_rows = min(stop - first, self.capacity - place)
            yield first, {name: column[place : place + num_rows] for name, column in self.columns.items()}
            first += num_rows
