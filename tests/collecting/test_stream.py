"""The queue that drops: what it keeps, and books that hold in any order of arriving, dropping, taking and dying."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freerun.collecting.scheduling.drop_statistics import MIN_EPISODES, DropStatistics
from freerun.collecting.scheduling.dropping_queue import DroppingQueue
from freerun.core import Demand, Segment
from freerun.telemetry.ledger import Ledger


class Player:
    """A collector: episodes of known lengths, one after another in each of its columns; a step's reward is its number.

    Episode k lasts 1 + 7 k % 11 steps.
    """

    def __init__(self, worker: int, num_workers: int, num_columns: int = 1, first: int | None = None):
        self.last_begun = worker - num_workers if first is None else first - num_workers
        self._stride = num_workers
        self._columns = [self._begin() for _ in range(num_columns)]

    def _begin(self) -> tuple[int, int]:
        self.last_begun += self._stride
        return self.last_begun, 0

    def play(self, num_steps: int) -> Segment:
        shape = (num_steps, len(self._columns))
        reward, ended, number = np.zeros(shape, np.float32), np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        for row in range(num_steps):
            for column in range(shape[1]):
                episode, step = self._columns[column]
                number[row, column], reward[row, column] = episode, step + 1
                ended[row, column] = step + 1 == length_of(episode)
                self._columns[column] = self._begin() if ended[row, column] else (episode, step + 1)
        zeros = np.zeros(shape, np.float32)
        return Segment(
            obs=zeros,
            action=zeros,
            log_prob=zeros,
            reward=reward,
            terminated=ended,
            truncated=np.zeros_like(ended),
            next_obs=zeros,
            version=np.zeros(shape, np.int64),
            episode=number,
            seconds=0.5,
        )


def length_of(episode: int) -> int:
    return 1 + 7 * episode % 11


def taken(stream: DroppingQueue, steps: int) -> list[int] | None:
    """The episode that each segment taken begins with."""
    stream.open(Demand(steps=steps))
    segments = stream.take()
    return None if segments is None else [int(segment.episode[0, 0]) for segment in segments]


def fill(stream: DroppingQueue, num_segments: int) -> None:
    """With episodes of one step each: segment k holds episode 11 k."""
    player = Player(0, 11)
    for number in range(num_segments):
        segment = player.play(1)
        assert segment.episode.item() == 11 * number
        assert segment.ended.all()
        stream.finish(0, segment)


def test_takes_as_much_as_was_asked_for_and_the_oldest_first() -> None:
    stream = DroppingQueue(max_workers=11, max_queue_size=9)
    fill(stream, 6)
    assert taken(stream, 2) == [0, 11]
    assert taken(stream, 1) == [22]
    assert [int(segment.episode.item()) for segment in stream.take_arrived()] == [33, 44, 55]
    assert stream.take_arrived() == []
    assert taken(stream, 1) is None


def test_the_oldest_is_dropped_and_counted() -> None:
    stream = DroppingQueue(max_workers=11, max_queue_size=3)
    fill(stream, 5)
    assert stream.counts().queue_fill == 1.0
    assert taken(stream, 3) == [22, 33, 44]
    counts = stream.counts()
    assert (counts.steps_dropped, counts.episodes_dropped, counts.episodes_started) == (2, 2, 5)
    assert counts.steps_dropped_by_worker == {0: 2}
    assert counts.steps_dropped_by_length == {1: 2}
    assert counts.queue_fill == 0.0


def test_a_demand_larger_than_the_queue_is_met() -> None:
    stream = DroppingQueue(max_workers=1, max_queue_size=2)
    player = Player(0, 1)
    stream.open(Demand(steps=40))
    for _ in range(9):
        stream.finish(0, player.play(4))
        assert stream.take() is None
    stream.finish(0, player.play(4))
    segments = stream.take()
    assert segments is not None
    assert sum(segment.num_steps for segment in segments) == 40
    assert stream.counts().steps_dropped == 0


def test_an_episode_that_lost_its_middle_is_never_reported_as_whole() -> None:
    stream, ledger = DroppingQueue(max_workers=1, max_queue_size=1), Ledger()
    player = Player(0, 1, first=1)  # episode 1 lasts 8 steps
    stream.finish(0, player.play(3))
    ledger.account(stream.take_arrived())
    stream.finish(1, player.play(3))
    stream.finish(2, player.play(4))  # drops the one before; ends episode 1 and begins episode 2
    (last,) = stream.take_arrived()
    np.testing.assert_array_equal(last.episode[:, 0], [1, 1, 2, 2])
    assert last.after_gap is not None
    np.testing.assert_array_equal(last.after_gap[:, 0], [True, True, False, False])
    ledger.account([last])
    assert (ledger.steps, ledger.episodes, ledger.num_broken) == (7, 0, 1)
    ledger.finish_update()
    ledger.check_balance(stream.counts())
    assert stream.counts().steps_dropped_by_length == {8: 3}


def test_an_episode_whose_end_was_dropped_is_cut() -> None:
    stream, ledger = DroppingQueue(max_workers=1, max_queue_size=1), Ledger()
    player = Player(0, 1, first=1)
    stream.finish(0, player.play(4))
    ledger.account(stream.take_arrived())
    stream.finish(1, player.play(4))
    stream.finish(2, player.play(4))
    ledger.account(stream.take_arrived())
    ledger.finish_update()
    counts = stream.counts()
    ledger.check_balance(counts)
    assert counts.episodes_cut == 1
    assert ledger.num_broken == 0
    assert 1 not in ledger.state_dict()["_open"], "of episode 1 nothing more will come: it need not be remembered"


def test_important_segments_are_kept_and_taken_first() -> None:
    stream = DroppingQueue(max_workers=11, max_queue_size=3)
    player = Player(0, 11)
    for importance in (1.0, 5.0, 3.0, 0.5, 4.0):
        stream.finish(0, player.play(1), importance)
    assert taken(stream, 1) == [11]
    assert taken(stream, 2) == [22, 44], "the two that are left, in the order of their arrival"
    assert stream.counts().steps_dropped == 2


def test_rare_lengths_are_kept() -> None:
    stream = DroppingQueue(max_workers=11, max_queue_size=4, prefers_rare_lengths=True)
    fill(stream, 8)  # length 1
    rare = Player(1, 11).play(8)  # episode 1, length 8
    stream.finish(0, rare)
    fill_more = Player(0, 11, first=88)
    for _ in range(8):
        stream.finish(0, fill_more.play(1))
    assert taken(stream, 1) == [1]


def test_an_alarm_says_when_dropped_steps_come_from_longer_episodes(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropStatistics()
    with caplog.at_level(logging.WARNING, "freerun"):
        for _ in range(10 * MIN_EPISODES):  # one step in ten, whatever the length: what is left is as it was
            drops.settle(10, 1, ended=True)
            drops.settle(100, 10, ended=True)
        assert abs(drops.bias) < 0.02
        assert not caplog.records
        for _ in range(10 * MIN_EPISODES):
            drops.settle(10, 0, ended=True)
            drops.settle(100, 90, ended=True)
        assert drops.bias > 0.3
        assert len(caplog.records) == 1, "once a minute"
        assert "longer than those of the steps that were kept" in caplog.text


class StreamMachine(RuleBasedStateMachine):
    """Collectors, queue, learner and ledger in any order."""

    @initialize(
        num_workers=st.integers(1, 3), num_columns=st.integers(1, 3), size=st.integers(1, 4), rare=st.booleans()
    )
    def start(self, num_workers: int, num_columns: int, size: int, rare: bool) -> None:
        self.stream = DroppingQueue(num_workers, size, prefers_rare_lengths=rare)
        self.ledger = Ledger()
        self.num_workers, self.num_columns = num_workers, num_columns
        self.players = [Player(worker, num_workers, num_columns) for worker in range(num_workers)]
        self.num_played = 0
        self.lengths_ended: set[int] = set()

    @rule(worker=st.integers(0, 2), num_steps=st.integers(1, 9), importance=st.none() | st.integers(0, 3))
    def arrive(self, worker: int, num_steps: int, importance: int | None) -> None:
        segment = self.players[worker % self.num_workers].play(num_steps)
        self.num_played += segment.num_steps
        self.stream.finish(0, segment, importance or 0.0)

    @rule(worker=st.integers(0, 2), unheard_steps=st.integers(0, 9), tolerant=st.booleans())
    def die(self, worker: int, unheard_steps: int, tolerant: bool) -> None:
        worker %= self.num_workers
        if unheard_steps:
            self.players[worker].play(unheard_steps)
        self.stream.accounting.end_worker(worker, self.players[worker].last_begun if tolerant else None)
        first = self.stream.accounting.next_episode(worker)
        self.players[worker] = Player(worker, self.num_workers, self.num_columns, first)

    @rule(steps=st.integers(0, 30))
    def learn(self, steps: int) -> None:
        demand = Demand(steps=steps)
        self.stream.open(demand)
        segments = self.stream.take() if demand else self.stream.take_arrived()
        if segments is None:
            return
        assert sum(segment.num_steps for segment in segments) >= steps
        self.ledger.account(segments)
        self.lengths_ended |= {length_of(number) for part in segments for number in part.episode[part.ended].tolist()}
        assert {length for _, length in self.ledger.recent_episodes} <= self.lengths_ended
        for total, length in self.ledger.recent_episodes:
            assert total == length * (length + 1) / 2, "the return of a whole episode and nothing else"

    @rule()
    def update(self) -> None:
        self.ledger.finish_update()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "stream"):
            return
        counts = self.stream.counts()
        self.ledger.check_balance(counts)
        queued, in_hand = self.stream.num_waiting_steps(), self.stream.num_reserved_steps()
        assert counts.steps_delivered == self.ledger.steps + in_hand
        assert self.num_played == counts.steps_delivered + counts.steps_dropped + queued
        assert sum(counts.steps_dropped_by_worker.values()) == counts.steps_dropped
        live = self.stream.accounting.num_dropped_live()
        assert sum(counts.steps_dropped_by_length.values()) + live == counts.steps_dropped
        assert self.ledger.summary(counts)["handed_over_untrained"] >= 0

    @invariant()
    def every_number_is_accounted_for(self) -> None:
        if not hasattr(self, "stream"):
            return
        counts, accounting = self.stream.counts(), self.stream.accounting
        numbers = sum(accounting.next_episode(worker) // self.num_workers for worker in range(self.num_workers))
        unseen = accounting.num_live_unseen()
        assert counts.episodes_started + unseen == numbers, "every number was played, or given up"


StreamMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestStream = StreamMachine.TestCase


@pytest.mark.parametrize(("unit_seconds", "pause"), [(0.003, 0.05), (0.5, 2.0)])
def test_a_full_queue_is_refreshed_at_leisure(
    unit_seconds: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 50 ms; and where a unit takes long, as often as a quarter of one collector's time allows."""
    now = [100.0]
    monkeypatch.setattr("freerun.collecting.scheduling.dropping_queue.time.monotonic", lambda: now[0])
    stream, player = DroppingQueue(1, max_queue_size=2), Player(0, 1)
    for unit in range(2):  # there is room: nobody waits
        assert stream.next() == unit
        assert stream.seconds_to_next() == 0
        stream.finish(unit, dataclasses.replace(player.play(4), seconds=unit_seconds))
    assert stream.next() == 2  # full: one that takes the place of another
    assert stream.next() is None
    assert stream.seconds_to_next() == pytest.approx(pause)
    now[0] += pause + 0.01
    assert stream.next() == 3
    assert stream.next() is None
    for unit in (2, 3):
        stream.finish(unit, dataclasses.replace(player.play(4), seconds=unit_seconds))
    stream.open(Demand(steps=4))
    assert stream.take() is not None
    assert stream.next() == 4  # there is room again


def test_from_half_on_a_place_in_the_queue_is_for_one_collector_and_not_for_each() -> None:
    stream, player = DroppingQueue(1, max_queue_size=4), Player(0, 1)
    assert [stream.next() for _ in range(6)] == [0, 1, 2, 3, 4, 5], "while it is not half full all of them collect"
    for unit in range(3):
        stream.finish(unit, player.play(4))
    assert stream.next() == 6, "three are there and three to come: what comes now refreshes it"
    assert stream.next() is None
    stream.open(Demand(steps=8))
    assert stream.take() is not None
    assert [stream.next(), stream.next()] == [7, 8], "one is there: not half full"
