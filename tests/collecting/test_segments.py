"""Workers that come and go: their episodes, and where a new one begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_rollout import FIELDS, make_rollout, make_single, run
from test_stream import Player, StreamMachine

from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.scheduling.dropping_queue import DroppingQueue
from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.core import Counts, Demand


def test_a_worker_that_joins_leaves_out_what_is_settled_and_one_that_retires_holds_nothing_up() -> None:
    accounting = EpisodeAccounting(4, num_playing=1)  # four places, of which the first is taken
    player = Player(0, 4)  # episodes 0, 4, 8, … of 1, 7, 2, 8, 3 steps
    for arrival in range(2):
        segment = player.play(5)
        accounting.arrive(arrival, segment)
        accounting.hand_over(arrival, segment)
    assert accounting.complete(Counts()).episodes_settled == 12  # 1 + 7 + 2 steps: all three have ended
    assert accounting.begin_worker(2) == 14  # not 2, 6 or 10: those are settled
    assert accounting.complete(Counts()).episodes_settled == 12
    accounting.retire_worker(0)
    assert accounting.complete(Counts()).episodes_settled == 14
    assert accounting.begin_worker(0) == 16  # after 12, which belongs to the time before


def test_episodes_that_were_open_when_their_worker_was_let_go_are_cut() -> None:
    accounting = EpisodeAccounting(2)
    segment = Player(1, 2).play(3)  # episode 1 has 8 steps
    accounting.arrive(0, segment)
    accounting.hand_over(0, segment)
    accounting.retire_worker(1)
    counts = accounting.complete(Counts())
    assert (counts.episodes_started, counts.episodes_cut, counts.episodes_dropped) == (1, 1, 0)


def test_a_queue_that_shrinks_drops_its_oldest_and_counts_them() -> None:
    stream = DroppingQueue(1, max_queue_size=4)
    player = Player(0, 1)
    for _ in range(4):
        stream.finish(stream.next() or 0, player.play(2))
    stream.resize(1)
    counts = stream.counts()
    assert (counts.steps_dropped, counts.queue_fill) == (6, 1.0)
    stream.open(Demand(steps=2))
    taken = stream.take()
    assert taken is not None
    assert sum(segment.num_steps for segment in taken) == 2


@pytest.mark.parametrize("alone", [False, True])
def test_segments_of_changing_length_laid_end_to_end_are_the_episodes(alone: bool) -> None:
    lengths = [5, 1, 40, 3, 200, 8] * 10
    each: Iterator[int] = iter(lengths)
    player = (
        make_single("toy_envs:Audit", short=7, long=50)
        if alone
        else make_rollout("toy_envs:Audit", 1, short=7, long=50)
    )
    made = player.segments(lambda: next(each), next_from(itertools.count()))
    segments = [segment.copy() for segment in itertools.islice(made, len(lengths) - 1)]
    assert [segment.num_steps for segment in segments] == lengths[:-1]
    episodes = {int(segment.episode[0, 0]): segment for segment in run("toy_envs:Audit", 1, 400, short=7, long=50)}
    joined = {name: np.concatenate([getattr(segment, name) for segment in segments]) for name in FIELDS}
    for number in np.unique(joined["episode"]).tolist():
        mine = joined["episode"] == number
        for name in FIELDS:
            np.testing.assert_array_equal(joined[name][mine], getattr(episodes[number], name)[: mine.sum(), 0])


class ElasticMachine(StreamMachine):
    """The same while collectors come and go, and the queue grows and shrinks."""

    @rule(worker=st.integers(0, 2))
    def leave(self, worker: int) -> None:
        worker %= self.num_workers
        if self._num_playing() > 1 and self.stream.accounting.is_playing(worker):
            self.stream.accounting.retire_worker(worker)

    def _num_playing(self) -> int:
        return sum(map(self.stream.accounting.is_playing, range(self.num_workers)))

    @rule(size=st.integers(1, 4))
    def resize(self, size: int) -> None:
        self.stream.resize(size)

    @rule(worker=st.integers(0, 2), num_steps=st.integers(1, 9), importance=st.none() | st.integers(0, 3))
    def arrive(self, worker: int, num_steps: int, importance: int | None) -> None:
        self._join(worker % self.num_workers)
        super().arrive(worker, num_steps, importance)

    @rule(worker=st.integers(0, 2), unheard_steps=st.integers(0, 9), tolerant=st.booleans())
    def die(self, worker: int, unheard_steps: int, tolerant: bool) -> None:
        self._join(worker % self.num_workers)
        super().die(worker, unheard_steps, tolerant)

    def _join(self, worker: int) -> None:
        if not self.stream.accounting.is_playing(worker):
            settled = self.stream.counts().episodes_settled
            first = self.stream.accounting.begin_worker(worker)
            assert first >= settled, "it would play what the ledger has closed"
            self.players[worker] = Player(worker, self.num_workers, self.num_columns, first)

    @invariant()
    def every_number_is_accounted_for(self) -> None:
        """But for those that were left out: what is settled stays so."""
        if hasattr(self, "stream"):
            settled = self.stream.counts().episodes_settled
            assert settled >= getattr(self, "_settled", 0)
            self._settled = settled


ElasticMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestElastic = ElasticMachine.TestCase
