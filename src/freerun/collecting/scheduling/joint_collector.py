"""One learner's part of what several learners collect: its share of every demand, from workers of its own."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from freerun.collecting.scheduling.rounds import EpisodeLengths
from freerun.core import (
    AnySegment,
    Collector,
    Counts,
    Demand,
    FloatArray,
    LearnerGroup,
    Segment,
    SharedSeed,
    StartPoint,
)

NOT_SUMMED = (
    "busy_seconds",
    "episodes_settled",
    "drop_bias",
    "queue_fill",
    "steps_dropped_by_worker",
    "steps_dropped_by_length",
    "step_calls",
)
"""Fields of `Counts` that are joined in another way than by a sum, or not at all."""


def own_collector(collector: Collector) -> Collector:
    """The collector of this process: one of several learners, or the only one."""
    return collector.own if isinstance(collector, JointCollector) else collector


def share_of_start(start: StartPoint, learners: LearnerGroup) -> StartPoint:
    """Return where one learner goes on. The counts so far go to the first learner."""
    # The k-th of N learners has ceil((e - k) / N) of the first e episodes.
    episode = (start.episode - learners.index + learners.count - 1) // learners.count
    return replace(start, episode=episode, counts=start.counts if learners.index == 0 else Counts())


class JointCollector:
    """A collector of the k-th of N learners, which collects the episodes k, k + N, k + 2N, …

    The collector inside numbers them 0, 1, 2, … Demands and counts are those of all learners together. Without lag, the
    learners together collect the same round of whole episodes that a single learner would have collected.
    """

    def __init__(
        self,
        collector: Collector,
        learners: LearnerGroup,
        start: StartPoint,
        hands_over_episodes: bool,
        takes_turns: bool,
        time_limit: int | None = None,
        deterministic: bool = False,
    ):
        self.own = collector
        """The collector of this learner."""
        self._learners = learners
        self._seed = SharedSeed(0, learners.index, learners.count)
        self._hands_over_episodes = hands_over_episodes
        self._takes_turns = takes_turns
        self._lengths = EpisodeLengths(time_limit, start.lengths)
        self._num_demanded = start.episode  # episodes of all learners so far
        self._num_taken = share_of_start(start, learners).episode  # episodes of this learner so far
        self._workers_of_each: list[int] = learners.gather(collector.num_workers)
        self.num_workers = sum(self._workers_of_each)
        self._num_envs = 1 if deterministic else self.num_workers  # this is n in `Rounds`
        self._counts = start.counts

    def counts(self) -> Counts:
        """Return the counts of the last publication, because only then the learners exchange them."""
        return self._counts

    def publish(self, weights: FloatArray, version: int) -> None:
        self.own.publish(weights, version)
        # Learners add up their gradients, which makes sense only while all have the same weights to the last bit.
        reports = self._learners.gather((zlib.crc32(weights.tobytes()), self.own.counts()))
        if len({checksum for checksum, _ in reports}) > 1:
            raise RuntimeError(f"the learners have come to different weights at version {version}")
        self._counts = self._joined([counts for _, counts in reports])

    def collect(self, demand: Demand) -> Sequence[AnySegment]:
        collected = self.own.collect(self._share_of(demand))
        segments = [segment for segment in collected if isinstance(segment, Segment)]
        if not segments and collected:
            return collected  # of tensors, whose episodes have no numbers
        self._num_taken += len(segments)
        if self._hands_over_episodes:
            mine = [(int(self._in_run(segment.episode[0, 0])), segment.num_steps) for segment in segments]
            of_all = sorted(pair for pairs in self._learners.gather(mine) for pair in pairs)
            self._lengths.note(num_steps for _, num_steps in of_all)
        for segment in segments:
            segment.episode = self._in_run(segment.episode)
        return segments

    def _share_of(self, demand: Demand) -> Demand:
        if not demand:
            return demand
        steps = math.ceil(demand.steps / self._learners.count)
        next_steps, left = (
            None if number is None else math.ceil(number / self._learners.count)
            for number in (demand.next_steps, demand.steps_left)
        )
        if not self._hands_over_episodes or (self._takes_turns and not demand.whole_episodes):
            return Demand(0, steps, demand.whole_episodes, next_steps, left)
        self._num_demanded += self._num_episodes(demand)
        # The same share as in `share_of_start`, without what this learner has already taken.
        mine = (
            self._num_demanded - self._learners.index + self._learners.count - 1
        ) // self._learners.count - self._num_taken
        return Demand(mine, steps, demand.whole_episodes, next_steps, left) if mine > 0 else Demand()

    def _num_episodes(self, demand: Demand) -> int:
        """Return how many episodes all learners play now. The loop demands again what is then missing."""
        steps = demand.steps or demand.steps_left
        if steps is None:
            return demand.episodes
        num_episodes = self._lengths.episodes_for(steps, self._num_envs)
        return min(num_episodes, demand.episodes) if demand.episodes else num_episodes

    def _in_run(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn this learner's episode numbers into those of the run."""
        in_run: NDArray[np.int64] = self._seed.number(numbers)
        return in_run

    def _joined(self, every: Sequence[Counts]) -> Counts:
        joined = Counts()
        for field in fields(Counts):
            if field.name not in NOT_SUMMED:
                setattr(joined, field.name, sum(getattr(counts, field.name) for counts in every))
        joined.busy_seconds = every[self._learners.index].busy_seconds  # compared with the time of its own workers
        # Episode e of the k-th of N learners is episode e * N + k of the run.
        settled = [counts.episodes_settled * len(every) + index for index, counts in enumerate(every)]
        joined.episodes_settled = min(settled)
        joined.drop_bias = max((counts.drop_bias for counts in every), key=abs)
        fills = [counts.queue_fill for counts in every if counts.queue_fill is not None]
        joined.queue_fill = sum(fills) / len(fills) if fills else None
        first = 0
        by_length: Counter[int] = Counter()
        for counts, num_workers in zip(every, self._workers_of_each, strict=True):
            for worker, steps in counts.steps_dropped_by_worker.items():
                joined.steps_dropped_by_worker[first + worker] = steps
            by_length.update(counts.steps_dropped_by_length)
            first += num_workers
        joined.steps_dropped_by_length = dict(by_length)
        return joined

    def close(self) -> None:
        self.own.close()
