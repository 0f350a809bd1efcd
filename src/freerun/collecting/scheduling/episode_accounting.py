"""Accounting of episodes that are handed over in pieces: what has arrived, was taken, was dropped or was cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from freerun.collecting.scheduling.drop_statistics import DropStatistics
from freerun.core import Counts, Segment, StartPoint


@dataclass(slots=True)
class _LiveEpisode:
    """An episode that is not settled: more of it may come, or a part of it waits to be taken."""

    waiting: list[int] = field(default_factory=list)
    """The arrivals, in order, that hold a part of it and wait to be taken."""
    length: int = 0
    """Steps that have arrived so far."""
    num_dropped: int = 0
    is_running: bool = True
    has_ended: bool = False
    is_handed_over: bool = False
    """A part of it, at least, was handed to the learner."""
    is_in_order: bool = True
    """No part of it was dropped, or taken before an earlier one."""
    is_marked: bool = False
    """The learner has got a part of it that is marked as `after_gap`."""


class EpisodeAccounting:
    """Keeps account of episodes that are handed over in segments.

    Worker w of W plays episodes w, w + W, w + 2W, …, each in whichever of its environments is free. When a worker is
    replaced, the episodes that it had open stay cut where they were. An episode counts as started when a part of it is
    handed to the learner, because then the ledger knows it, or when all of it was dropped.
    """

    def __init__(self, max_workers: int, start: StartPoint | None = None, num_playing: int | None = None):
        """`max_workers` is W, the largest number of workers; `num_playing` of them play at first (all if None)."""
        start = start or StartPoint()
        before = start.counts
        self.drops = DropStatistics(before)
        self._max_workers = max_workers
        self._live: dict[int, _LiveEpisode] = {}
        first = -(-start.episode // max_workers) * max_workers  # the next multiple of W
        # By worker: the newest episode that has arrived or was given up.
        self._newest = [first + index - max_workers for index in range(max_workers)]
        self._playing = set(range(max_workers if num_playing is None else num_playing))
        self._num_handed_over = before.episodes_started - before.episodes_dropped
        self._num_dropped = before.episodes_dropped
        self._num_cut = before.episodes_cut

    def next_episode(self, worker: int) -> int:
        """Return the episode that a worker plays next."""
        return self._newest[worker] + self._max_workers

    def begin_worker(self, worker: int) -> int:
        """Return the first episode of a worker that starts now. One that did not play skips what is settled by now."""
        if worker not in self._playing:
            latest = max(self._newest)
            # The smallest number of this worker's own episodes that is not below the latest of all.
            self._newest[worker] = latest + (worker - latest) % self._max_workers
            self._playing.add(worker)
        return self.next_episode(worker)

    def is_playing(self, worker: int) -> bool:
        return worker in self._playing

    def retire_worker(self, worker: int) -> None:
        """Note that a worker has handed over all that it played and plays no more. Its open episodes stay cut."""
        self.end_worker(worker)
        self._playing.discard(worker)

    def arrive(self, arrival: int, segment: Segment) -> list[int]:
        """Note that a segment waits to be taken; return the lengths of the episodes that ended in it.

        `arrival` is the number by which the segment is named when it is taken or dropped.
        """
        ended = set(segment.episode[segment.ended].tolist())
        for number, num_steps in _steps_by_episode(segment):
            episode = self._live.setdefault(number, _LiveEpisode())
            episode.waiting.append(arrival)
            episode.length += num_steps
            if number in ended:
                episode.is_running, episode.has_ended = False, True
        worker = number % self._max_workers
        self._newest[worker] = max(self._newest[worker], number)  # the numbers come sorted, so the last is the newest
        return [self._live[number].length for number in ended]

    def hand_over(self, arrival: int, segment: Segment) -> Segment:
        """Note that the learner takes a segment; mark its steps before which steps of their episode are missing."""
        with_gaps = []
        for number, _ in _steps_by_episode(segment):
            episode = self._live[number]
            if episode.waiting[0] != arrival:
                episode.is_in_order = False
            episode.waiting.remove(arrival)
            self._num_handed_over += not episode.is_handed_over
            episode.is_handed_over = True
            if not episode.is_in_order:
                episode.is_marked = True
                with_gaps.append(number)
            self._settle(number, episode)
        if with_gaps:
            segment.after_gap = np.isin(segment.episode, with_gaps)
        return segment

    def drop(self, arrival: int, segment: Segment) -> None:
        """Note that nobody will take a segment."""
        for number, num_steps in _steps_by_episode(segment):
            episode = self._live[number]
            episode.waiting.remove(arrival)
            episode.num_dropped += num_steps
            episode.is_in_order = False
            self._settle(number, episode)
        self.drops.add(number % self._max_workers, segment.num_steps)

    def end_worker(self, worker: int, last_begun: int | None = None) -> None:
        """Cut a worker's open episodes. Given the last one that it began, those that never arrived are given up."""
        for number, episode in list(self._live.items()):
            if episode.is_running and number % self._max_workers == worker:
                episode.is_running = False
                self._settle(number, episode)
        if last_begun is not None and last_begun > self._newest[worker]:
            self._num_dropped += (last_begun - self._newest[worker]) // self._max_workers
            self._newest[worker] = last_begun

    def _settle(self, number: int, episode: _LiveEpisode) -> None:
        """Forget an episode of which nothing more will come and nothing waits."""
        if episode.is_running or episode.waiting:
            return
        del self._live[number]
        self.drops.settle(episode.length, episode.num_dropped, episode.has_ended)
        if not episode.is_handed_over:
            self._num_dropped += 1
        elif not episode.is_marked and not (episode.has_ended and episode.is_in_order):
            self._num_cut += 1  # the ledger waits for an end that will not come

    def num_dropped_live(self) -> int:
        """Return the dropped steps of episodes that are not settled, which no length accounts for yet."""
        return sum(episode.num_dropped for episode in self._live.values())

    def num_live_unseen(self) -> int:
        """Return the number of episodes that have arrived and of which the learner has got nothing so far."""
        return sum(not episode.is_handed_over for episode in self._live.values())

    def complete(self, counts: Counts) -> Counts:
        """Return the counts of a scheduler, which counts units, with the numbers of episodes filled in."""
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


def _steps_by_episode(segment: Segment) -> list[tuple[int, int]]:
    """Return the episodes of a segment, sorted by number, with their steps in it."""
    episodes = segment.episode.ravel() if segment.resting is None else segment.episode[~segment.resting]
    return sorted(Counter(episodes.tolist()).items())
