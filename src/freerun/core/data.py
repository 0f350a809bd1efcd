"""The data that travels between environments, workers and the learner: segments, demands, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # workers never import torch: they must start quickly and stay small
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
    """Log-probability of the action under the weights that chose it (the behaviour policy)."""
    reward: FloatArray
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next_obs: Array
    """The observation after the step. At the end of an episode it is the final one, never the first of the next."""
    version: NDArray[np.int64]
    """The number of updates behind the weights that chose the action."""
    episode: NDArray[np.int64]
    """The number of each step's episode."""
    seconds: float
    """Wall time that the worker spent on the segment."""
    after_gap: NDArray[np.bool_] | None = None
    """True where earlier steps of the same episode are missing, because a queue has dropped them or hands them over
    later: nobody may take its return and length for those of a whole episode. None where nothing is missing."""
    memory: FloatArray | None = None
    """What a `MemoryPolicy` remembered before the first step, [B, memory_size]. None where that is nothing: where
    episodes begin, and for policies without a memory."""
    resting: NDArray[np.bool_] | None = None
    """True where an environment was reset instead of stepped, so that nobody may learn from this row: see
    `BatchReset.NEXT_STEP`. Collectors take such rows out before they hand over a segment. None if all rows are steps.
    """

    @property
    def num_steps(self) -> int:
        return int(self.reward.size) - (0 if self.resting is None else int(self.resting.sum()))

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated

    def copy(self) -> Segment:
        """Return a copy with its own arrays, for a segment whose arrays will be overwritten."""
        arrays = {name: getattr(self, name).copy() for name in SEGMENT_ARRAYS}
        optional = {name: array.copy() for name in OPTIONAL_ARRAYS if (array := getattr(self, name)) is not None}
        memory = None if self.memory is None else self.memory.copy()
        return Segment(**arrays, seconds=self.seconds, memory=memory, **optional)

    def part(self, start: int, stop: int, column: int) -> Segment:
        """Return the steps from `start` to `stop` of one environment, in arrays of their own and without memory."""
        here = (slice(start, stop), slice(column, column + 1))
        arrays = {name: getattr(self, name)[here].copy() for name in SEGMENT_ARRAYS}
        optional = {name: array[here].copy() for name in OPTIONAL_ARRAYS if (array := getattr(self, name)) is not None}
        return Segment(**arrays, seconds=self.seconds, **optional)


OPTIONAL_ARRAYS = ("after_gap", "resting")
"""The arrays [T, B] that most segments do not have."""
# Without `seconds`, which is a number, and `memory`, which is not that of every step.
SEGMENT_ARRAYS = tuple(
    field.name for field in fields(Segment) if field.name not in ("seconds", "memory", *OPTIONAL_ARRAYS)
)


@dataclass
class TensorSegment:
    """Consecutive steps of N environments that are stepped as tensors, [T, N, ...] on their device.

    Unlike in a `Segment`, the weights of one version chose all actions.
    """

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Tensor
    episode_return: Tensor
    """The sum of rewards of the episode up to and including each step."""
    episode_length: Tensor
    """Steps of the episode up to and including each step."""
    version: int
    seconds: float
    worker: int = 0
    """The worker whose environments these are. Its next segment continues where this one ends."""
    memory: Tensor | None = None
    """As that of a `Segment`: what a `MemoryTensorActor` remembered before the first step, [N, memory_size]."""
    number: int = 0
    """How many segments this worker has collected before."""
    versions_played: tuple[int, ...] = ()
    """What was played to get here: the versions of the worker's segments since the last one that was handed over, with
    those that were dropped or rejected and with this one. Empty if a later segment was handed over before."""

    @property
    def num_steps(self) -> int:
        return self.reward.numel()

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


AnySegment = Segment | TensorSegment


@dataclass(frozen=True)
class Demand:
    """What an algorithm needs before its next update. An empty demand means "update now".

    With both `episodes` and `steps`, the algorithm wants steps, and `episodes` is the number known to contain them.
    """

    episodes: int = 0
    steps: int = 0
    whole_episodes: bool = True
    """If False, parts of episodes are enough: the rest of them comes with later demands."""
    next_steps: int | None = None
    """Steps of the next demand, if it differs from this one. Workers may collect this much ahead for each update of lag
    that is allowed."""
    steps_left: int | None = None
    """Steps that --total-steps leaves for this demand and all later ones. No more are collected, even if the demand
    is in episodes."""

    def __bool__(self) -> bool:
        return self.episodes > 0 or self.steps > 0


class RingBuffer:
    """A ring buffer of the newest `capacity` rows, as part of a checkpoint, which saves only rows that are new.

    `columns` are arrays or tensors [capacity, ...]. Row n lies at index n % capacity.
    """

    def __init__(self, columns: Mapping[str, Any], total: int):
        self.columns = columns
        self.total = total
        """The number of rows that were ever added, including those that were overwritten."""
        self.capacity = len(next(iter(columns.values())))

    @property
    def first(self) -> int:
        """The number of the oldest row that is still there."""
        return max(0, self.total - self.capacity)

    def pieces(self, first: int | None = None, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows from `first` to `stop`, oldest first, in pieces: the number of the first row, and columns."""
        first, stop = self.first if first is None else first, self.total if stop is None else stop
        while first < stop:
            # A piece ends where the buffer wraps around.
            place = first % self.capacity
            num_rows = min(stop - first, self.capacity - place)
            yield first, {name: column[place : place + num_rows] for name, column in self.columns.items()}
            first += num_rows
