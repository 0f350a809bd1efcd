"""A queue in order of importance, and one measure of importance: how rare the lengths of episodes are."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Arrival(NamedTuple, Generic[Item]):
    """An item of the queue. They sort by importance, and equally important ones by age."""

    negative_importance: float
    number: int
    """Arrivals are numbered from 0. No two are equal, so items, which have no order, are never compared."""
    item: Item


class ImportanceQueue(Generic[Item]):
    """Hands over the most important item first and drops the least important one. Among equals it is the oldest."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._arrivals: list[Arrival[Item]] = []  # sorted

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Item]:
        return (arrival.item for arrival in self._arrivals)

    def next_number(self) -> int:
        """Take the number that an item gets which is added now."""
        return next(self._numbers)

    def add(self, number: int, item: Item, importance: float = 0.0) -> None:
        bisect.insort(self._arrivals, Arrival(-importance, number, item))

    def take_first(self) -> Arrival[Item]:
        return self._arrivals.pop(0)

    def drop_least(self) -> Arrival[Item]:
        # A tuple of one number sorts before all longer ones that begin with it: this finds the first of them.
        oldest_of_the_least = bisect.bisect_left(self._arrivals, (self._arrivals[-1].negative_importance,))
        return self._arrivals.pop(oldest_of_the_least)


class LengthRarity:
    """How rare the lengths of episodes are, by powers of two."""

    def __init__(self) -> None:
        self._lengths: Counter[int] = Counter()

    def note(self, lengths: Sequence[int]) -> float:
        """Return −log of the share that the rarest of these lengths has among all episodes; 0 if none has ended."""
        bins = Counter(length.bit_length() for length in lengths)
        self._lengths.update(bins)
        total = self._lengths.total()
        return max((-math.log(self._lengths[place] / total) for place in bins), default=0.0)
