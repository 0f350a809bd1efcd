"""Episodes that are handed over in pieces: their books, and the rounds of segments that they lie across."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from freerun.collectors.drops import Drops
from freerun.collectors.rounds import Rounds
from freerun.core import Counts, Demand, Dial, Segment, Start, UserError

REACH = 4


@dataclass(slots=True)
class _Episode:
    """One of which more may come, or some of which has not been taken."""

    waiting: list[int] = field(default_factory=list)
    """The segments, in order, that hold a part of it and wait to be taken."""
    length: int = 0
    """Steps that have arrived so far."""
    num_dropped: int = 0
    running: bool = True
    ended: bool = False
    handed_over: bool = False
    """In part, at least."""
    in_order: bool = True
    """No part of it was dropped, or taken before an earlier one."""
    told: bool = False
    """The learner has been told that it is not: see `Segment.episode`."""


class Parts:
    """The books of episodes that are handed over in pieces.

    Worker w plays episodes w, w + W, w + 2W, …, each in whichever of its environments is free. When it is replaced,
    those that were open stay cut where they were. An episode counts as started when a part of it is handed to the
    learner (then the ledger knows it) or when all of it was dropped.
    """

    def __init__(self, num_workers: int, start: Start | None = None, num_playing: int | None = None):
        """Of workers that there may be; those that play are so many of them, or all."""
        start = start or Start()
        before = start.counts
        self.drops = Drops(before)
        self._num_workers = num_workers
        self._live: dict[int, _Episode] = {}
        first = -(-start.episode // num_workers) * num_workers
        self._newest = [first + index - num_workers for index in range(num_workers)]  # of each, heard of or given up
        self._playing = set(range(num_workers if num_playing is None else num_playing))
        self._num_handed_over = before.episodes_started - before.episodes_dropped
        self._num_dropped = before.episodes_dropped
        self._num_cut = before.episodes_cut

    def next_episode(self, worker: int) -> int:
        """Of a worker."""
        return self._newest[worker] + self._num_workers

    def begin_worker(self, worker: int) -> int:
        """Where a worker that is started now begins: one that did not play before leaves out what is settled by now."""
        if worker not in self._playing:
            latest = max(self._newest)
            self._newest[worker] = latest + (worker - latest) % self._num_workers
            self._playing.add(worker)
        return self.next_episode(worker)

    def retire_worker(self, worker: int) -> None:
        """It has handed over all that it played, and plays no more: its open episodes stay cut."""
        self.end_worker(worker)
        self._playing.discard(worker)

    def arrive(self, segment: Segment) -> list[int]:
        """A segment waits to be taken; returns the lengths of the episodes that ended in it."""
        ends = set(segment.episode[segment.ended].tolist())
        for number, num_steps in _numbers(segment):
            episode = self._live.setdefault(number, _Episode())
            episode.waiting.append(id(segment))  # its own for as long as it waits
            episode.length += num_steps
            if number in ends:
                episode.running, episode.ended = False, True
        worker = number % self._num_workers
        self._newest[worker] = max(self._newest[worker], number)  # they come sorted
        return [self._live[number].length for number in ends]

    def hand_over(self, segment: Segment) -> Segment:
        """The learner takes it: with the numbers of episodes of which it misses something turned negative."""
        with_gaps = []
        for number, _ in _numbers(segment):
            episode = self._live[number]
            if episode.waiting[0] != id(segment):
                episode.in_order = False
            episode.waiting.remove(id(segment))
            self._num_handed_over += not episode.handed_over
            episode.handed_over = True
            if not episode.in_order:
                episode.told = True
                with_gaps.append(number)
            self._settle(number, episode)
        if with_gaps:
            numbers = segment.episode
            segment.episode = np.where(np.isin(numbers, with_gaps), -1 - numbers, numbers)
        return segment

    def drop(self, segment: Segment) -> None:
        """Nobody will take it."""
        for number, num_steps in _numbers(segment):
            episode = self._live[number]
            episode.waiting.remove(id(segment))
            episode.num_dropped += num_steps
            episode.in_order = False
            self._settle(number, episode)
        self.drops.add(number % self._num_workers, segment.num_steps)

    def end_worker(self, worker: int, last_begun: int | None = None) -> None:
        """Its open episodes stay cut. Given the last one that it began, those that nobody heard of are given up."""
        for number, episode in list(self._live.items()):
            if episode.running and number % self._num_workers == worker:
                episode.running = False
                self._settle(number, episode)
        if last_begun is not None and last_begun > self._newest[worker]:
            self._num_dropped += (last_begun - self._newest[worker]) // self._num_workers
            self._newest[worker] = last_begun

    def _settle(self, number: int, episode: _Episode) -> None:
        if episode.running or episode.waiting:
            return
        del self._live[number]
        self.drops.settle(episode.length, episode.num_dropped, episode.ended)
        if not episode.handed_over:
            self._num_dropped += 1
        elif not episode.told and not (episode.ended and episode.in_order):
            self._num_cut += 1  # the ledger waits for an end that will not come

    def correct(self, counts: Counts) -> Counts:
        """A store counts units; these are its episodes."""
        return replace(
            counts,
            episodes_started=self._num_handed_over + self._num_dropped,
            episodes_in_flight=0,
            episodes_cut=self._num_cut,
            episodes_dropped=self._num_dropped,
            episodes_settled=min([*self._live, *map(self.next_episode, self._playing)]),
            steps_dropped=self.drops.steps,
            steps_dropped_by_worker=dict(self.drops.by_worker),
            steps_dropped_by_length=dict(self.drops.by_length),
            drop_bias=self.drops.bias,
        )


def _numbers(segment: Segment) -> list[tuple[int, int]]:
    """The episodes of a segment, sorted, with their steps in it."""
    return sorted(Counter(segment.episode.ravel().tolist()).items())


def segment_dial(configured: int, read: Callable[[], float], turn: Callable[[float], None]) -> Dial:
    """Steps of every environment that are handed over at a time: up to four times as many as configured, or as few."""
    return Dial("collection_batch", read, turn, max(1.0, configured // REACH), configured * REACH)


def refuse_episodes(demand: Demand, mode: str) -> None:
    if demand.episodes:
        raise UserError(
            f"--episodes-per-update needs whole episodes, which --mode {mode} hands over in pieces: "
            "give --steps-per-update, or choose --mode freerun or pipes"
        )


class SegmentRounds(Rounds):
    """Rounds of segments of `unit_steps`; with a `queue_size`, so many may wait beyond the round and no more."""

    def __init__(
        self,
        num_workers: int,
        max_lag: int | None,
        unit_steps: int,
        queue_size: int | None = None,
        start: Start | None = None,
        num_playing: int | None = None,
    ):
        super().__init__(max_lag, unit_steps, start)
        self.parts = Parts(num_workers, start, num_playing)
        self.queue_size = queue_size

    def open(self, demand: Demand) -> None:
        super().open(demand)
        if self.queue_size is not None:
            self._limit = min(self._limit, self._end + self.queue_size)
            self._fill_queue()

    def resize(self, queue_size: int) -> None:
        """From the next round on, what was granted stays so."""
        self.queue_size = queue_size

    def cut(self, unit_steps: int) -> None:
        """Segments are so long from now on; those under way may be longer or shorter."""
        self._unit_steps = unit_steps

    def finish(self, number: int, segment: Segment) -> None:
        super().finish(number, segment)
        self.parts.arrive(segment)

    def _take_until(self, end: int) -> list[Segment]:
        segments = [self.parts.hand_over(segment) for segment in super()._take_until(end)]
        self._fill_queue()
        return segments

    def _fill_queue(self) -> None:
        """Without a limit to the lag, whatever leaves the queue makes room for more."""
        if self.queue_size is not None and self._max_lag is None:
            self._limit = max(self._end, self._first) + self.queue_size

    def counts(self) -> Counts:
        counts = self.parts.correct(super().counts())
        if self.queue_size is not None:
            counts.queue_fill = min(1.0, len(self._finished) / self.queue_size)
        return counts
