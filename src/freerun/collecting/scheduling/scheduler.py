"""What a scheduler is: it decides which units may start and holds finished ones until the learner takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from freerun.core import Counts, Demand, Segment, Tunable, TuningBounds

DEFAULT_MAX_QUEUE_SIZE = 64
"""How far --adapt may lengthen a shorter queue, where no bound is given."""


class Scheduler(Protocol):
    """Decides which units may start and holds finished ones: `Rounds`, `SegmentRounds` or `DroppingQueue`."""

    totals: Counts
    """Running totals, which `counts` completes with what is in flight."""
    version: int
    """The newest version of the weights."""

    def open(self, demand: Demand) -> None:
        """Grant what meets the learner's next demand."""
        ...

    def next(self) -> int | None:
        """Return a unit that may start now, or None."""
        ...

    def seconds_to_next(self) -> float | None:
        """Return the time until `next` would return a unit; None if only the learner can change that."""
        ...

    def finish(self, number: int, segment: Segment, importance: float = 0.0) -> None:
        """Take a finished unit. Only a queue that drops segments looks at their importance."""
        ...

    def counts(self) -> Counts: ...

    def take(self) -> list[Segment] | None:
        """Return what meets the demand, or None while it is not met."""
        ...

    def take_arrived(self) -> list[Segment]:
        """Return what has arrived, without waiting."""
        ...


class BoundedScheduler(Protocol):
    """A scheduler whose queue can be made longer or shorter."""

    @property
    def queue_size(self) -> int | None: ...

    def resize(self, queue_size: int) -> None: ...


def queue_size_tunable(read: Callable[[], int], resize: Callable[[int], None], bounds: TuningBounds | None) -> Tunable:
    """The length of a queue, which --adapt may change."""
    bound = bounds.max_queue_size if bounds is not None else None
    high = max(read(), bound or DEFAULT_MAX_QUEUE_SIZE)
    return Tunable("queue_size", read, lambda value: resize(int(value)), 1.0, high)
