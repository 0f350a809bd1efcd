"""Rounds of segments: an update takes the first that finish and waits only for those that the lag makes due."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_rounds import episode, taken

from freerun.collecting.scheduling.segment_rounds import UnitRounds
from freerun.core import Demand


def test_no_more_units_start_ahead_than_keep_the_workers_busy() -> None:
    rounds = UnitRounds(max_lag=3, unit_steps=10, most_ahead=4)
    rounds.open(Demand(steps=20))
    assert len(list(iter(rounds.next, None))) == 2 + 4, "the lag would allow 2 + 3 * 2"


def test_more_units_start_during_an_update_if_the_learner_would_wait_for_the_next_round() -> None:
    rounds = UnitRounds(max_lag=3, unit_steps=10, most_ahead=4)
    rounds.open(Demand(steps=20))
    assert list(iter(rounds.next, None)) == [0, 1, 2, 3, 4, 5]
    for number in (0, 1, 2):
        rounds.finish(number, episode(number, 10))
    assert taken(rounds) == [0, 1]
    assert list(iter(rounds.next, None)) == [6, 7], "one unit is left, and a round has two"
    rounds.version = 1
    rounds.open(Demand(steps=20))
    assert rounds.next() is None, "the limit was raised already"
    for number in (3, 4, 5):
        rounds.finish(number, episode(number, 10))
    assert taken(rounds) == [2, 3]
    assert rounds.next() is None, "two units are left: the learner is the slower one, and more would only get older"


def test_what_starts_during_an_update_is_one_update_older() -> None:
    rounds = UnitRounds(max_lag=1, unit_steps=10)
    rounds.open(Demand(steps=20))
    assert list(iter(rounds.next, None)) == [0, 1, 2, 3]
    for number in (0, 1):
        rounds.finish(number, episode(number, 10))
    assert taken(rounds) == [0, 1]
    assert rounds.next() is None, "a unit of the round after next would be two updates old when it is taken"


def test_an_update_does_not_wait_for_a_slow_segment_until_the_lag_makes_it_due() -> None:
    rounds = UnitRounds(max_lag=1, unit_steps=10, most_ahead=2)
    rounds.open(Demand(steps=20))
    assert list(iter(rounds.next, None)) == [0, 1, 2, 3]
    for number in (3, 1):
        assert rounds.take() is None
        rounds.finish(number, episode(number, 10))
    assert taken(rounds) == [1, 3], "the first two that finish"
    rounds.version = 1
    rounds.open(Demand(steps=20))
    assert list(iter(rounds.next, None)) == [4, 5]
    for number in (4, 5):
        rounds.finish(number, episode(number, 10, version=1))
    assert rounds.take() is None, "after this update, 0 and 2 would be two updates old"
    rounds.finish(2, episode(2, 10))
    assert rounds.take() is None
    rounds.finish(0, episode(0, 10))
    assert taken(rounds) == [0, 2]
    assert rounds.counts().episodes_in_flight == 2


class UnitRoundsMachine(RuleBasedStateMachine):
    """Workers whose segments continue each other, and a learner, in any order."""

    @initialize(max_lag=st.integers(0, 3), num_workers=st.integers(1, 4))
    def start(self, max_lag: int, num_workers: int) -> None:
        self.rounds = UnitRounds(max_lag, 3, most_ahead=num_workers)
        self.max_lag = max_lag
        self.playing: list[tuple[int, int] | None] = [None] * num_workers  # unit and version, by worker
        self.last_taken = [-1] * num_workers
        self.worker_of: dict[int, int] = {}
        self.num_taken = 0
        self.wanted = 0

    @precondition(lambda self: not self.wanted)
    @rule(units=st.integers(1, 5))
    def demand(self, units: int) -> None:
        self.rounds.open(Demand(steps=3 * units))
        self.wanted = units

    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        """A worker finishes what it plays, or starts what it is granted."""
        worker = data.draw(st.integers(0, len(self.playing) - 1))
        held = self.playing[worker]
        if held is not None:
            self.rounds.finish(held[0], episode(held[0], 3, held[1]))
            self.playing[worker] = None
        elif (number := self.rounds.next()) is not None:
            self.playing[worker] = (number, self.rounds.version)
            self.worker_of[number] = worker

    @precondition(lambda self: self.wanted)
    @rule()
    def take_and_update(self) -> None:
        segments = self.rounds.take()
        if segments is None:
            return
        assert len(segments) >= self.wanted
        for segment in segments:
            number = int(segment.episode[0, 0])
            worker = self.worker_of[number]
            assert number > self.last_taken[worker], "a worker's segments are taken in their order"
            self.last_taken[worker] = number
            assert self.rounds.version - int(segment.version[0, 0]) <= self.max_lag
        self.num_taken += len(segments)
        self.wanted = 0
        self.rounds.version += 1

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rounds"):
            counts = self.rounds.counts()
            assert counts.episodes_started == self.num_taken + counts.episodes_in_flight

    def teardown(self) -> None:
        """Whatever is demanded can be met: nobody waits for ever."""
        if not hasattr(self, "rounds") or not self.wanted:
            return
        for _ in range(1000):
            if self.rounds.take() is not None:
                return
            for worker, held in enumerate(self.playing):
                if held is not None:
                    self.rounds.finish(held[0], episode(held[0], 3, held[1]))
                    self.playing[worker] = None
                elif (number := self.rounds.next()) is not None:
                    self.playing[worker] = (number, self.rounds.version)
        raise AssertionError("the demand is never met")


UnitRoundsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestUnitRounds = UnitRoundsMachine.TestCase
