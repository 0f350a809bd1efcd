"""The grants of episodes, as a state machine: any order of finishing, dying and updating."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freerun.collectors.rounds import FIRST_ROUND_EPISODES, Rounds
from freerun.core import Demand, Segment


def episode(number: int, num_steps: int, version: int = 0) -> Segment:
    shape = (num_steps, 1)
    zeros = np.zeros(shape, np.float32)
    flags = np.zeros(shape, np.bool_)
    return Segment(
        obs=zeros[..., None],
        action=zeros,
        log_prob=zeros,
        reward=zeros,
        terminated=flags,
        truncated=flags,
        next_obs=zeros[..., None],
        version=np.full(shape, version),
        episode=np.full(shape, number),
        seconds=0.0,
    )


def finish(rounds: Rounds, num_steps: int = 10) -> list[int]:
    """Run everything that is granted."""
    numbers = []
    while (number := rounds.next()) is not None:
        numbers.append(number)
        rounds.finish(number, episode(number, num_steps))
    return numbers


def taken(rounds: Rounds) -> list[int]:
    segments = rounds.take()
    assert segments is not None
    return [int(segment.episode[0, 0]) for segment in segments]


def test_without_lag_only_the_round_may_start() -> None:
    rounds = Rounds(max_lag=0)
    rounds.open(Demand(episodes=3))
    assert finish(rounds) == [0, 1, 2]
    assert taken(rounds) == [0, 1, 2]
    assert rounds.next() is None


def test_lag_grants_what_the_next_update_needs_and_not_a_large_first_demand_again() -> None:
    rounds = Rounds(max_lag=1, unit_steps=10)
    rounds.open(Demand(steps=5000, next_steps=50))
    assert len(finish(rounds)) == 505
    assert len(taken(rounds)) == 500


def test_with_lag_later_rounds_start_early_and_order_is_kept() -> None:
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(episodes=2))
    started = [rounds.next() for _ in range(5)]
    assert started == [0, 1, 2, 3, None]
    for number in (3, 1, 2):
        rounds.finish(number, episode(number, 10))
    assert rounds.take() is None, "episode 0 is still running: later ones must not take its place"
    assert rounds.missing == [0]
    rounds.finish(0, episode(0, 10))
    assert taken(rounds) == [0, 1]


def test_a_lost_episode_runs_again_before_anything_new() -> None:
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(episodes=2))
    assert [rounds.next(), rounds.next()] == [0, 1]
    rounds.lost(0)
    assert rounds.next() == 0
    assert rounds.next() == 2
    assert rounds.counts().episodes_rerun == 1
    assert rounds.counts().episodes_started == 3


def test_demand_in_steps_becomes_episodes_by_their_length() -> None:
    rounds = Rounds(max_lag=0)
    rounds.open(Demand(steps=1000))
    assert len(finish(rounds, num_steps=50)) == FIRST_ROUND_EPISODES  # 400 steps
    taken(rounds)
    rounds.open(Demand(steps=600))
    assert len(finish(rounds, num_steps=50)) == 12  # 600 / 50: measured under these very weights
    taken(rounds)
    rounds.version = 1
    rounds.open(Demand(steps=1000))
    assert len(finish(rounds, num_steps=50)) == 15  # three quarters of 20: the new weights may be better
    taken(rounds)


def test_the_rest_of_a_round_and_the_next_one_need_not_wait_for_its_first_part() -> None:
    """A round of 1,000 steps is asked for in parts; all of it may start at once, and the next 1,000 steps too."""
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(steps=1000, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 20 + 20
    assert len(taken(rounds)) == FIRST_ROUND_EPISODES
    rounds.open(Demand(steps=600, next_steps=1000))  # the rest
    assert finish(rounds, num_steps=50) == []
    assert len(taken(rounds)) == 12
    assert finish(rounds, num_steps=50) == [], "the learner learns: what started now would be too old"
    rounds.version = 1
    rounds.open(Demand(steps=1000, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 20, "one round is there, and another may start before it is taken"
    assert len(taken(rounds)) == 20


def test_the_rest_of_a_round_does_not_shrink_what_may_be_collected_ahead() -> None:
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(steps=400, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 8 + 20
    taken(rounds)
    rounds.open(Demand(steps=100, next_steps=1000))  # two episodes more
    assert len(finish(rounds, num_steps=50)) == 2


def test_a_demand_in_steps_grants_nothing_ahead_before_lengths_are_known() -> None:
    rounds = Rounds(max_lag=4)
    rounds.open(Demand(steps=1000))
    running = list(iter(rounds.next, None))
    assert len(running) == FIRST_ROUND_EPISODES
    for number in running[:-1]:
        rounds.finish(number, episode(number, 50))
        assert rounds.next() is None
    rounds.finish(running[-1], episode(running[-1], 50))
    assert len(list(iter(rounds.next, None))) == 1000 * 5 / 50 - FIRST_ROUND_EPISODES


def test_a_demand_in_steps_runs_ahead_by_the_newest_lengths() -> None:
    """Episodes that grow longer must not make a round larger than was asked for."""
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(steps=80))
    assert len(finish(rounds, num_steps=10)) == FIRST_ROUND_EPISODES + 8  # 80 steps, and 80 more ahead
    taken(rounds)
    rounds.version = 1
    rounds.open(Demand(steps=80))
    for number in [rounds.next() for _ in range(4)]:
        assert number is not None
        rounds.finish(number, episode(number, 100))
    assert rounds.next() is None, "400 steps are under way: more than enough, though eight episodes used to be"


def test_segments_of_known_size_are_counted_exactly() -> None:
    rounds = Rounds(max_lag=2, unit_steps=32)
    rounds.open(Demand(steps=100))
    assert len(finish(rounds, num_steps=32)) == 4 * 3
    assert len(taken(rounds)) == 4


def test_an_episode_that_would_grow_too_old_is_taken_with_the_round() -> None:
    rounds = Rounds(max_lag=1)
    rounds.open(Demand(episodes=4))
    finish(rounds)  # 0–7, all started at version 0
    assert taken(rounds) == [0, 1, 2, 3]
    rounds.version = 1
    rounds.open(Demand(episodes=1))
    assert taken(rounds) == [4, 5, 6, 7], "at the next update 5–7 would be two updates old"


class RoundsMachine(RuleBasedStateMachine):
    """Plays learner and workers in any order."""

    @initialize(max_lag=st.integers(0, 3))
    def start(self, max_lag: int) -> None:
        self.rounds = Rounds(max_lag)
        self.max_lag = max_lag
        self.version = 0
        self.running: dict[int, int] = {}  # episode: version of its weights
        self.first_version: dict[int, int] = {}
        self.num_taken = 0
        self.is_open = False

    @precondition(lambda self: not self.is_open)
    @rule(episodes=st.integers(1, 5))
    def demand(self, episodes: int) -> None:
        self.rounds.open(Demand(episodes=episodes))
        self.is_open = True
        self.wanted = episodes

    @rule()
    def start_episode(self) -> None:
        number = self.rounds.next()
        if number is not None:
            assert number not in self.running
            assert number >= self.num_taken
            self.running[number] = self.version
            self.first_version.setdefault(number, self.version)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_episode(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.rounds.finish(number, episode(number, 3, self.running.pop(number)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_episode(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[number]
        self.rounds.lost(number)

    @precondition(lambda self: self.is_open)
    @rule()
    def take_and_update(self) -> None:
        segments = self.rounds.take()
        if segments is None:
            assert self.rounds.missing
            return
        numbers = [int(segment.episode[0, 0]) for segment in segments]
        assert numbers == list(range(self.num_taken, self.num_taken + len(numbers)))
        assert len(numbers) >= self.wanted
        for segment in segments:
            assert self.version - int(segment.version[0, 0]) <= self.max_lag
        self.num_taken += len(numbers)
        self.is_open = False
        self.version += 1
        self.rounds.version = self.version

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rounds"):
            counts = self.rounds.counts()
            assert counts.episodes_started == self.num_taken + counts.episodes_in_flight


RoundsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestRounds = RoundsMachine.TestCase


def test_what_was_dealt_out_and_not_begun_is_dealt_out_again_first_and_is_no_rerun() -> None:
    rounds = Rounds(max_lag=0)
    rounds.open(Demand(episodes=4))
    assert [rounds.next() for _ in range(3)] == [0, 1, 2]
    rounds.put_back([1, 2])
    assert [rounds.next() for _ in range(4)] == [1, 2, 3, None]
    counts = rounds.counts()
    assert (counts.episodes_started, counts.episodes_in_flight, counts.episodes_rerun) == (4, 4, 0)
