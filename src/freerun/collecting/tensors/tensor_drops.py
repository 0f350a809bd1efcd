"""Which episodes of tensor environments have lost steps, and how many: they have no numbers, only places."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freerun.collecting.scheduling.drop_statistics import DropStatistics
from freerun.core import Counts, TensorSegment


class EpisodeEnds(NamedTuple):
    """The episodes that have ended in a segment, sorted by environment and then by time."""

    env: NDArray[np.int64]
    row: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of(cls, segment: TensorSegment) -> EpisodeEnds:
        # Of the transposed flags, because `nonzero` sorts by the first index. One copy from the device.
        places = segment.ended.T.nonzero()
        env, row = places[:, 0], places[:, 1]
        return cls(*(part.cpu().numpy() for part in (env, row, segment.episode_length[row, env])))


class _Fate(NamedTuple):
    """What has become of a segment."""

    num_rows: int
    ended: EpisodeEnds
    is_dropped: bool


class TensorDrops:
    """Turns segments that were dropped into steps that were dropped, by the lengths of their episodes.

    The steps of an episode lie in segments of one worker that follow each other. So the fates of a worker's segments
    are taken in the order in which these were collected, whatever the order in which they were decided.
    """

    def __init__(self, num_envs_of_each: list[int], before: Counts):
        self.statistics = DropStatistics(before)
        self._dropped_of_open = [np.zeros(num_envs, np.int64) for num_envs in num_envs_of_each]
        """By worker and environment: the steps of the episode in progress that were dropped."""
        self._next = [0] * len(num_envs_of_each)  # by worker: the segment whose fate is taken next
        self._begins_anew: list[set[int]] = [set() for _ in num_envs_of_each]  # segments before which all was given up
        self._decided: list[dict[int, _Fate | None]] = [{} for _ in num_envs_of_each]

    def note(self, segment: TensorSegment, ended: EpisodeEnds, is_dropped: bool) -> None:
        """Note that a segment was dropped, or taken by the learner."""
        if is_dropped:
            self.statistics.add(segment.worker, segment.num_steps)
        self._decide(segment.worker, segment.number, _Fate(len(segment.reward), ended, is_dropped))

    def note_rejected(self, segment: TensorSegment) -> None:
        """Note a segment that was rejected: all episodes of its worker were given up with it."""
        self.statistics.add(segment.worker, segment.num_steps)
        self._decide(segment.worker, segment.number, None)

    def note_new_episodes(self, worker: int, next_number: int) -> None:
        """Note that all episodes of a worker were given up before the segment with this number."""
        self._begins_anew[worker].add(next_number)

    def _decide(self, worker: int, number: int, fate: _Fate | None) -> None:
        decided = self._decided[worker]
        decided[number] = fate
        while self._next[worker] in decided:
            if self._next[worker] in self._begins_anew[worker]:
                self._begins_anew[worker].remove(self._next[worker])
                self._dropped_of_open[worker][:] = 0
            self._take(self._dropped_of_open[worker], decided.pop(self._next[worker]))
            self._next[worker] += 1

    def _take(self, dropped_of_open: NDArray[np.int64], fate: _Fate | None) -> None:
        if fate is None:
            dropped_of_open[:] = 0
            return
        env, row, length = fate.ended
        is_first = np.diff(env, prepend=-1) != 0  # of its environment in this segment
        is_last = np.diff(env, append=-1) != 0
        # An episode begins after the one before it in the same environment, or before this segment.
        before = np.where(is_first, -1, np.roll(row, 1))
        num_dropped = fate.is_dropped * (row - before) + np.where(is_first, dropped_of_open[env], 0)
        in_time = np.argsort(row, kind="stable")
        self.statistics.settle_many(length[in_time], num_dropped[in_time])
        dropped_of_open += fate.is_dropped * fate.num_rows
        # Of the episodes that have begun in this segment, only the rows after the last end count.
        dropped_of_open[env[is_last]] = fate.is_dropped * (fate.num_rows - 1 - row[is_last])
