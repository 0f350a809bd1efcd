"""A bounded queue between collectors that never wait and the learner: when it is full, a segment is dropped."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.scheduling.importance_queue import Arrival, ImportanceQueue, LengthRarity
from freerun.core import Counts, Demand, Segment, StartPoint

REFRESH_SECONDS = 0.05
"""While the queue is full, a new segment only replaces one that nobody has learned from, so it may start this late.
Each costs the learner's process time: with an environment as fast as Pendulum, at full speed, nine tenths of it."""
REFRESH_SHARE = 0.25
"""The share of one collector's time that goes into such segments. They also cost cores: without this limit, many
collectors of a slow simulator would leave the learner hardly any."""


class DroppingQueue:
    """A queue that drops the least important segment when it is too long, and hands over the most important first.

    Among equally important segments the oldest comes first, in both cases.
    """

    def __init__(
        self,
        max_workers: int,
        max_queue_size: int,
        prefers_rare_lengths: bool = False,
        start: StartPoint | None = None,
        num_playing: int | None = None,
    ):
        self.totals = replace(start.counts) if start else Counts()
        self.version = 0
        self.accounting = EpisodeAccounting(max_workers, start, num_playing)
        self.queue_size = max_queue_size
        self._units = itertools.count()
        self._running: set[int] = set()
        self._queue: ImportanceQueue[Segment] = ImportanceQueue()
        self._wanted = 0
        self._round: list[Arrival[Segment]] = []  # taken out of the queue for a demand that is not met yet
        self._rarity = LengthRarity() if prefers_rare_lengths else None
        self._next_refresh = 0.0
        self._unit_seconds = 0.0  # what the newest segment took

    def open(self, demand: Demand) -> None:
        self._wanted = demand.steps

    def next(self) -> int | None:
        """Return a unit. While the queue is full there is one only as often as refreshing it makes sense."""
        if self.seconds_to_next() > 0:
            return None
        if self._is_full():
            self._next_refresh = time.monotonic() + max(REFRESH_SECONDS, self._unit_seconds / REFRESH_SHARE)
        unit = next(self._units)
        self._running.add(unit)
        return unit

    def _is_full(self) -> bool:
        """True when the queue is full, or will be.

        From half on, running units count too. Otherwise every collector would fill the same place."""
        num_units = len(self._queue)
        if 2 * num_units > self.queue_size:
            num_units += len(self._running)
        return num_units >= self.queue_size

    def seconds_to_next(self) -> float:
        """Return the time until `next` would return a unit, if nothing is taken meanwhile."""
        return max(0.0, self._next_refresh - time.monotonic()) if self._is_full() else 0.0

    def finish(self, number: int, segment: Segment, importance: float = 0.0) -> None:
        self._running.discard(number)
        arrival = self._queue.next_number()
        lengths = self.accounting.arrive(arrival, segment)
        if self._rarity is not None:
            importance = self._rarity.note(lengths)
        self.totals.busy_seconds += segment.seconds
        self._unit_seconds = segment.seconds
        self._queue.add(arrival, segment, importance)
        self._drop_excess()

    def resize(self, queue_size: int) -> None:
        self.queue_size = queue_size
        self._drop_excess()

    def _drop_excess(self) -> None:
        while len(self._queue) > self.queue_size:
            _, arrival, dropped = self._queue.drop_least()
            self.accounting.drop(arrival, dropped)

    def num_waiting_steps(self) -> int:
        """Return the steps in the queue."""
        return sum(segment.num_steps for segment in self._queue)

    def num_reserved_steps(self) -> int:
        """Return the steps that were taken out for a demand that is not met yet."""
        return sum(arrival.item.num_steps for arrival in self._round)

    def counts(self) -> Counts:
        counts = self.accounting.complete(self.totals)
        return replace(counts, queue_fill=len(self._queue) / self.queue_size)

    def take(self) -> list[Segment] | None:
        """Return segments that meet the demand, or None. What waits for the rest of a demand is not dropped."""
        while self._queue and self._wanted > 0:
            self._wanted -= self._deliver()
        return None if self._wanted > 0 else self._hand_over_round()

    def take_arrived(self) -> list[Segment]:
        while self._queue:
            self._deliver()
        return self._hand_over_round()

    def _deliver(self) -> int:
        """Move the most important segment from the queue into the round; return its steps."""
        self._round.append(self._queue.take_first())
        num_steps = self._round[-1].item.num_steps
        self.totals.steps_delivered += num_steps
        return num_steps

    def _hand_over_round(self) -> list[Segment]:
        """Return the round in the order of arrival, so that the parts of an episode follow each other."""
        arrived = sorted(self._round, key=lambda arrival: arrival.number)
        self._round = []
        return [self.accounting.hand_over(arrival.number, arrival.item) for arrival in arrived]
