"""The grants of episodes, as a state machine: any order of finishing, dying and updating."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freerun.collecting.scheduling.rounds import KNOWN_EPISODES, EpisodeLengths, Rounds
from freerun.collecting.scheduling.segment_rounds import SegmentRounds, UnitRounds
from freerun.core import Demand, Segment, StartPoint


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
    rounds = UnitRounds(max_lag=1, unit_steps=10)
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


def test_a_demand_in_steps_is_met_by_the_fewest_episodes_that_reach_it() -> None:
    rounds = Rounds(max_lag=0, time_limit=1000)
    rounds.open(Demand(steps=2048))
    assert [rounds.next() for _ in range(4)] == [0, 1, 2, None], "three of 1,000 steps are enough, and two may not be"
    for number in (2, 0, 1):
        assert rounds.take() is None
        rounds.finish(number, episode(number, 1000))
    assert taken(rounds) == [0, 1, 2]


def test_episodes_that_end_early_make_room_for_others() -> None:
    rounds = Rounds(max_lag=0, time_limit=500)
    rounds.open(Demand(steps=2000))
    assert [rounds.next() for _ in range(5)] == [0, 1, 2, 3, None]
    rounds.finish(2, episode(2, 499))
    assert rounds.next() == 4, "499 and three times 500 are 1,999"
    rounds.finish(0, episode(0, 10))
    assert rounds.next() is None, "509 and three times 500 are 2,009"


def test_without_a_time_limit_one_episode_for_each_environment_may_start_until_lengths_are_known() -> None:
    rounds = Rounds(max_lag=0, num_envs=4)
    rounds.open(Demand(steps=1000))
    assert [rounds.next() for _ in range(5)] == [0, 1, 2, 3, None]
    for number in range(KNOWN_EPISODES - 1):
        rounds.finish(number, episode(number, 50))
        assert rounds.next() == number + 4, "one ends, one begins"
        assert rounds.next() is None
    rounds.finish(7, episode(7, 50))
    # 400 steps are there and 3 episodes are running; of 50 steps each, 9 more make 1,000.
    assert len(list(iter(rounds.next, None))) == 9


def test_the_first_to_finish_do_not_say_how_long_the_others_will_be() -> None:
    """They are the short ones: by their length far too many would start."""
    rounds = Rounds(max_lag=0, num_envs=20)
    rounds.open(Demand(steps=1000))
    assert len(list(iter(rounds.next, None))) == 20
    for number in range(1, 20):
        rounds.finish(number, episode(number, 2))
    assert len(list(iter(rounds.next, None))) == 19, "episode 0 is not known yet"


def test_all_environments_play_until_the_demand_is_met_and_no_longer() -> None:
    rounds = Rounds(max_lag=0, num_envs=3, time_limit=100, start=StartPoint(lengths=(20,) * KNOWN_EPISODES))
    rounds.open(Demand(steps=200))
    # Four could be 400 steps: two are not counted, two as 100.
    assert [rounds.next() for _ in range(5)] == [0, 1, 2, 3, None]
    rounds.finish(3, episode(3, 20))
    assert [rounds.next(), rounds.next()] == [4, None]
    for number in (0, 1, 2):
        rounds.finish(number, episode(number, 55))
    # 185 steps are there and one episode is running: 20 more are expected of it, which is enough.
    assert rounds.next() is None
    rounds.finish(4, episode(4, 5))
    assert rounds.next() == 5, "it was shorter"


def test_the_rest_of_a_round_and_the_next_one_need_not_wait_for_each_other() -> None:
    rounds = Rounds(max_lag=1, time_limit=50)
    rounds.open(Demand(steps=1000, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 20 + 20
    assert len(taken(rounds)) == 20
    assert finish(rounds, num_steps=50) == [], "the learner learns: what started now would be too old"
    rounds.version = 1
    rounds.open(Demand(steps=1000, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 20, "one round is there, and another may start before it is taken"
    assert len(taken(rounds)) == 20


def test_the_rest_of_a_round_does_not_shrink_what_may_be_collected_ahead() -> None:
    rounds = Rounds(max_lag=1, time_limit=50)
    rounds.open(Demand(steps=400, next_steps=1000))
    assert len(finish(rounds, num_steps=50)) == 8 + 20
    taken(rounds)
    rounds.open(Demand(steps=100, next_steps=1000))  # two episodes more
    assert len(finish(rounds, num_steps=50)) == 2


def test_a_demand_in_steps_runs_ahead_by_the_newest_lengths() -> None:
    """Episodes that grow longer must not make a round larger than was asked for."""
    rounds = Rounds(max_lag=1, num_envs=4)
    rounds.open(Demand(steps=80))
    assert len(finish(rounds, num_steps=10)) == 16  # 80 steps, and 80 more ahead
    taken(rounds)
    rounds.version = 1
    rounds.open(Demand(steps=80))
    for number in [rounds.next() for _ in range(4)]:
        assert number is not None
        rounds.finish(number, episode(number, 100))
    assert rounds.next() is None, "400 steps are under way: more than enough, though eight episodes used to be"


def test_a_demand_in_episodes_ends_with_the_steps_of_the_run() -> None:
    rounds = Rounds(max_lag=1, time_limit=100)
    rounds.open(Demand(episodes=10, steps_left=350))
    assert [rounds.next() for _ in range(5)] == [0, 1, 2, 3, None]
    for number in range(4):
        rounds.finish(number, episode(number, 100))
    assert rounds.next() is None
    assert taken(rounds) == [0, 1, 2, 3]


def test_nothing_is_collected_ahead_that_the_run_has_no_steps_left_for() -> None:
    rounds = Rounds(max_lag=3, time_limit=100)
    rounds.open(Demand(steps=200, next_steps=200, steps_left=350))
    assert len(finish(rounds, num_steps=100)) == 4
    assert len(taken(rounds)) == 2
    assert rounds.next() is None
    segments = UnitRounds(max_lag=3, unit_steps=50)
    segments.open(Demand(steps=100, steps_left=220))
    assert len(finish(segments, num_steps=50)) == 5
    queue = SegmentRounds(1, None, 50, queue_size=10)
    queue.open(Demand(steps=100, steps_left=220))
    assert len(list(iter(queue.next, None))) == 5


def test_how_many_episodes_of_several_learners_start_together() -> None:
    assert EpisodeLengths(1000).episodes_for(2048, 1) == 3
    assert EpisodeLengths(1000).episodes_for(2048, 8) == 3, "three are expected to be enough"
    assert EpisodeLengths(1000).episodes_for(2000, 1) == 2
    assert EpisodeLengths().episodes_for(2048, 1) == 1, "nothing is known"
    assert EpisodeLengths().episodes_for(2048, 8) == 8
    mixed = [20] * 7 + [200]
    assert EpisodeLengths(None, mixed).episodes_for(2048, 1) == 11, "eleven of 200 steps, the longest"
    assert EpisodeLengths(None, mixed).episodes_for(2048, 8) == 18
    assert EpisodeLengths(500, [20] * KNOWN_EPISODES).episodes_for(2048, 8) == 12
    assert EpisodeLengths(500, [20] * KNOWN_EPISODES).episodes_for(30, 8) == 2, "two of 20 are expected to be enough"


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def play(
    max_lag: int, rounds: Rounds, lengths: list[int], num_workers: int, num_ahead: int, draw: Random, budget: int
) -> list[Any]:
    """Updates of 100 steps until the run has none left, episodes finishing in any order: the episodes of each."""
    updates: list[list[tuple[int, int]]] = []
    held: list[int] = []
    versions: dict[int, int] = {}
    num_steps = 0
    while num_steps < budget:
        fresh: list[tuple[int, int]] = []
        while (due := min(100 - sum(length for _, length in fresh), budget - num_steps)) > 0:
            rounds.open(Demand(steps=due, next_steps=100, steps_left=budget - num_steps))
            while (segments := rounds.take()) is None:
                while len(held) < num_workers * num_ahead and (number := rounds.next()) is not None:
                    held.append(number)
                    versions[number] = rounds.version
                number = held.pop(draw.randrange(min(len(held), num_workers)))
                rounds.finish(number, episode(number, lengths[number % len(lengths)], versions[number]))
            fresh += [(int(segment.episode[0, 0]), segment.num_steps) for segment in segments]
            num_steps += sum(segment.num_steps for segment in segments)
            lags = [rounds.version - int(segment.version[0, 0]) for segment in segments]
            assert max(lags) <= max_lag
        updates.append(fresh)
        rounds.version += 1
    return updates


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_update_exceeds_its_demand_by_more_than_an_episode_per_environment(
    lengths: list[int], num_workers: int, num_ahead: int, max_lag: int, draw: Random
) -> None:
    rounds = Rounds(max_lag, num_envs=num_workers, time_limit=50)
    updates = play(max_lag, rounds, lengths, num_workers, num_ahead, draw, budget=950)
    numbers = [number for update in updates for number, _ in update]
    assert numbers == list(range(len(numbers)))
    for update in updates:
        assert sum(length for _, length in update) < 100 + 50 * num_workers
    # Also what was played and never taken, for there was no update left to take it.
    started = rounds.counts().episodes_started
    assert sum(lengths[number % len(lengths)] for number in range(started)) < 950 + 50 * num_workers


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_deterministic_rounds_do_not_depend_on_workers_or_the_order_of_finishing(
    lengths: list[int], num_workers: int, num_ahead: int, has_limit: bool, draw: Random
) -> None:
    limit = 50 if has_limit else None
    found = [
        play(0, Rounds(0, num_envs=num, time_limit=limit, deterministic=True), lengths, num, ahead, draw, budget=950)
        for num, ahead in ((1, 1), (num_workers, num_ahead))
    ]
    assert found[0] == found[1]
    if has_limit:
        for update in found[0][:-1]:
            assert sum(length for _, length in update[:-1]) < 100, "the fewest episodes that meet the demand"


def test_segments_of_known_size_are_counted_exactly() -> None:
    rounds = UnitRounds(max_lag=2, unit_steps=32)
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
