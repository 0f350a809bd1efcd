"""One learner's part of what several collect: its share of every demand, from workers of its own."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from freerun.collectors.rounds import Lengths
from freerun.core import Collector, Counts, Demand, FloatArray, Peers, Segment, SharedSeed, Start

NOT_SUMS = (
    "busy_seconds",
    "episodes_settled",
    "drop_bias",
    "queue_fill",
    "steps_dropped_by_worker",
    "steps_dropped_by_length",
)


def share_of_start(start: Start, peers: Peers) -> Start:
    """Where one learner goes on; the books so far are the first one's."""
    episode = (start.episode - peers.index + peers.count - 1) // peers.count
    return replace(start, episode=episode, counts=start.counts if peers.index == 0 else Counts())


class Joint:
    """Of N learners, the k-th collects the episodes k, k + N, k + 2N, … with a collector that counts them 0, 1, 2, ….

    Demands are those of all together, and so are the counts. Without lag, a round of whole episodes is the one that a
    single learner would have collected, shared out.
    """

    def __init__(self, collector: Collector, peers: Peers, start: Start, hands_over_episodes: bool, takes_turns: bool):
        self._collector = collector
        self._peers = peers
        self._seed = SharedSeed(0, peers.index, peers.count)
        self._hands_over_episodes = hands_over_episodes
        self._takes_turns = takes_turns
        self._lengths = Lengths(start.last_round)
        self._version = 0
        self._asked = start.episode  # episodes of all learners
        self._taken = share_of_start(start, peers).episode  # of this one
        self._workers_of_each: list[int] = peers.gather(collector.num_workers)
        self.num_workers = sum(self._workers_of_each)
        self._counts = start.counts

    def counts(self) -> Counts:
        """As of the last publication: only then do the learners ask each other."""
        return self._counts

    def publish(self, weights: FloatArray, version: int) -> None:
        self._collector.publish(weights, version)
        self._version = version
        told = self._peers.gather((zlib.crc32(weights.tobytes()), self._collector.counts()))
        if len({checksum for checksum, _ in told}) > 1:
            raise RuntimeError(f"the learners have come to different weights at version {version}")
        self._counts = self._joined([counts for _, counts in told])

    def collect(self, demand: Demand) -> list[Segment]:
        collected = self._collector.collect(self._share_of(demand))
        segments = [segment for segment in collected if isinstance(segment, Segment)]
        self._taken += len(segments)
        if self._hands_over_episodes:
            num_steps = sum(segment.num_steps for segment in segments)
            sums = np.sum(self._peers.gather((num_steps, len(segments))), axis=0).tolist()
            self._lengths.note(self._version, *sums)
        for segment in segments:
            segment.episode = self._in_run(segment.episode)
        return segments

    def _share_of(self, demand: Demand) -> Demand:
        if not demand:
            return demand
        steps = math.ceil(demand.steps / self._peers.count)
        next_steps = None if demand.next_steps is None else math.ceil(demand.next_steps / self._peers.count)
        if not self._hands_over_episodes or (self._takes_turns and not demand.whole_episodes):
            return Demand(steps=steps, whole_episodes=demand.whole_episodes, next_steps=next_steps)
        self._asked += demand.episodes or self._lengths.episodes_for(demand.steps, self._version)
        mine = (self._asked - self._peers.index + self._peers.count - 1) // self._peers.count - self._taken
        return Demand(mine, steps, demand.whole_episodes, next_steps) if mine > 0 else Demand()

    def _in_run(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        negated = numbers < 0  # see `Segment.episode`
        in_run: NDArray[np.int64] = self._seed.number(np.where(negated, -1 - numbers, numbers))
        return np.where(negated, -1 - in_run, in_run)

    def _joined(self, every: Sequence[Counts]) -> Counts:
        joined = Counts()
        for field in fields(Counts):
            if field.name not in NOT_SUMS:
                setattr(joined, field.name, sum(getattr(counts, field.name) for counts in every))
        joined.busy_seconds = every[self._peers.index].busy_seconds  # set against the time of its own workers
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
        self._collector.close()
