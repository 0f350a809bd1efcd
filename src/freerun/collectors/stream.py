"""A bounded queue between collectors that never wait and the learner: when it is full, something is dropped."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from dataclasses import replace

from freerun.collectors.segments import Parts
from freerun.core import Counts, Demand, Segment, Start

REFRESH_SECONDS = 0.05
"""While the queue is full, a new segment only takes the place of one that nobody has learned from. Each costs the
learner's process time: with an environment as fast as Pendulum, at full speed, nine tenths of it."""
REFRESH_SHARE = 0.25
"""And it costs cores: so much of one collector's time, and no more, goes into such segments, or many collectors of a
slow simulator would leave the learner hardly any."""


class Stream:
    """Drops the least important segment when there are too many, and hands over the most important first.

    Where all are as important as each other that is the oldest, both times.
    """

    def __init__(
        self,
        num_workers: int,
        max_queue_size: int,
        prefers_rare_lengths: bool = False,
        start: Start | None = None,
        num_playing: int | None = None,
    ):
        self.book = replace(start.counts) if start else Counts()
        self.version = 0
        self.parts = Parts(num_workers, start, num_playing)
        self.queue_size = max_queue_size
        self._arrivals = itertools.count()
        self._units = itertools.count()
        self._under_way: set[int] = set()
        self._queue: list[tuple[float, int, Segment]] = []  # minus importance, arrival: sorted
        self._wanted = 0
        self._round: list[tuple[float, int, Segment]] = []  # out of the queue, for a demand that is not met yet
        self._prefers_rare_lengths = prefers_rare_lengths
        self._importances: dict[int, float] = {}  # of segments that are about to arrive
        self._lengths: Counter[int] = Counter()  # of episodes, by powers of two
        self._next_refresh = 0.0
        self._unit_seconds = 0.0  # of the newest segment

    def open(self, demand: Demand) -> None:
        self._wanted = demand.steps

    def next(self) -> int | None:
        """Anybody may start at any time; but while the queue is full, not faster than it makes sense to refresh it."""
        if self.seconds_to_next() > 0:
            return None
        if self._is_full():
            self._next_refresh = time.monotonic() + max(REFRESH_SECONDS, self._unit_seconds / REFRESH_SHARE)
        unit = next(self._units)
        self._under_way.add(unit)
        return unit

    def _is_full(self) -> bool:
        """Or will be: from half on what is under way counts too, or every place would be filled by each collector."""
        num_units = len(self._queue)
        if 2 * num_units > self.queue_size:
            num_units += len(self._under_way)
        return num_units >= self.queue_size

    def seconds_to_next(self) -> float:
        """Until `next` would give a unit, if nothing is taken meanwhile."""
        return max(0.0, self._next_refresh - time.monotonic()) if self._is_full() else 0.0

    def lost(self, number: int) -> None:
        """Nobody waits for this very unit."""
        self._under_way.discard(number)

    give_up = lost

    def announce(self, segment: Segment, importance: float) -> None:
        """Before it arrives; one that was not announced is as unimportant as can be."""
        self._importances[id(segment)] = importance

    def finish(self, number: int, segment: Segment) -> None:
        self._under_way.discard(number)
        importance = self._importances.pop(id(segment), 0.0)
        lengths = self.parts.arrive(segment)
        if self._prefers_rare_lengths:
            importance = self._rarity(lengths)
        self.book.busy_seconds += segment.seconds
        self._unit_seconds = segment.seconds
        bisect.insort(self._queue, (-importance, next(self._arrivals), segment))
        self._drop_excess()

    def resize(self, queue_size: int) -> None:
        self.queue_size = queue_size
        self._drop_excess()

    def _drop_excess(self) -> None:
        while len(self._queue) > self.queue_size:
            oldest_of_the_least = bisect.bisect_left(self._queue, (self._queue[-1][0],))
            *_, dropped = self._queue.pop(oldest_of_the_least)
            self.parts.drop(dropped)

    def _rarity(self, lengths: list[int]) -> float:
        """−log of the share of the rarest length among all episodes so far; 0 where none has ended."""
        bins = [length.bit_length() for length in lengths]
        self._lengths.update(bins)
        total = self._lengths.total()
        return max((-math.log(self._lengths[place] / total) for place in bins), default=0.0)

    def counts(self) -> Counts:
        counts = self.parts.correct(self.book)
        return replace(counts, queue_fill=len(self._queue) / self.queue_size)

    def take(self) -> list[Segment] | None:
        """As many segments as meet the demand; while the learner waits for more, those it has are safe from drops."""
        while self._queue and self._wanted > 0:
            self._wanted -= self._deliver()
        return None if self._wanted > 0 else self._hand_over_round()

    def take_arrived(self) -> list[Segment]:
        while self._queue:
            self._deliver()
        return self._hand_over_round()

    def _deliver(self) -> int:
        """Out of the queue, and into the books of what the learner gets."""
        self._round.append(self._queue.pop(0))
        num_steps = self._round[-1][2].num_steps
        self.book.steps_delivered += num_steps
        return num_steps

    def _hand_over_round(self) -> list[Segment]:
        """In the order of arrival, so that the parts of an episode follow each other."""
        arrived = sorted(self._round, key=lambda entry: entry[1])
        self._round = []
        return [self.parts.hand_over(segment) for _, _, segment in arrived]
