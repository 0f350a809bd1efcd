"""The prediction's maths, against numbers worked out by hand and closed forms."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from freerun.core import Demand
from freerun.tools.probe.forecast import line
from freerun.tools.probe.measurement import Environment, vector_seconds
from freerun.tools.probe.predict import (
    Learning,
    Work,
    core_shares,
    expected_max,
    never_waiting,
    overlap_ceiling,
    play_in_step,
    play_rounds,
)

FREE = Learning(Demand(episodes=4), 0.0)
"""An update after four episodes that takes no time."""


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_the_maximum_of_uniform_draws_is_n_over_n_plus_1(count: int) -> None:
    sample = np.linspace(0, 1, 10_001)
    assert expected_max(sample, count) == pytest.approx(count / (count + 1), rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_the_maximum_of_exponential_draws_is_a_harmonic_number(count: int) -> None:
    quantiles = (np.arange(200_000) + 0.5) / 200_000
    sample = -np.log(1 - quantiles)
    assert expected_max(sample, count) == pytest.approx(sum(1 / k for k in range(1, count + 1)), rel=1e-2)


def test_the_maximum_of_few_values_by_hand() -> None:
    # Of two draws from {1, 3} three pairs in four hold a 3.
    assert expected_max([3.0, 1.0], 2) == pytest.approx(0.25 * 1 + 0.75 * 3)


def test_overlap_is_worth_most_where_both_take_as_long() -> None:
    assert overlap_ceiling(1.0, 1.0) == 2.0
    assert overlap_ceiling(1.0, 3.0) == pytest.approx(4 / 3)
    assert overlap_ceiling(1.0, 0.0) == 1.0


def test_cores_are_shared_so_that_nobody_gets_more_than_it_wants() -> None:
    assert core_shares(2, 0.5, 1.0, cores=2.0) == (1.0, 1.0)
    # Three who want a core each, two cores: two thirds each.
    assert core_shares(2, 1.0, 1.0, cores=2.0) == pytest.approx((2 / 3, 2 / 3))
    # Ten who want a tenth each get it; the learner has the rest of one core and a bit.
    assert core_shares(10, 0.1, 1.0, cores=1.5) == pytest.approx((1.0, 0.5))
    # A hundred sleepers are 2 cores in sum: half speed, and the learner gets as much as one of them.
    assert core_shares(100, 0.02, 0.0, cores=1.0) == pytest.approx((0.5, 1.0))


def test_a_lone_worker_takes_turns_with_the_learner() -> None:
    # Without lag: 4 episodes of 1 s and 10 steps, then 40 steps × 0.1 s of learning: 40 steps in 8 s.
    learning = Learning(Demand(episodes=4), 0.1)
    rate = play_rounds(1, 1.0, 2.0, lambda: Work(1.0, 10), learning, max_lag=0)
    assert rate.steps_per_second == pytest.approx(5.0)
    assert rate.learner_busy == pytest.approx(0.5)


def test_with_lag_collecting_and_learning_overlap_up_to_the_ceiling() -> None:
    learning = Learning(Demand(episodes=4), 0.1)
    rate = play_rounds(1, 1.0, 2.0, lambda: Work(1.0, 10), learning, max_lag=1)
    assert rate.steps_per_second == pytest.approx(5.0 * overlap_ceiling(4.0, 4.0))


def test_a_single_core_leaves_nothing_to_overlap() -> None:
    learning = Learning(Demand(episodes=4), 0.1)
    rate = play_rounds(1, 1.0, 1.0, lambda: Work(1.0, 10), learning, max_lag=1)
    assert rate.steps_per_second == pytest.approx(5.0)


def test_workers_that_sleep_are_not_held_up_by_cores_and_those_that_compute_are() -> None:
    asleep = play_rounds(4, 0.0, 1.0, lambda: Work(1.0, 10), FREE, max_lag=0)
    awake = play_rounds(4, 1.0, 1.0, lambda: Work(1.0, 10), FREE, max_lag=0)
    assert asleep.steps_per_second == pytest.approx(40.0)
    assert awake.steps_per_second == pytest.approx(10.0)


def test_a_round_without_lag_waits_for_its_longest_episode() -> None:
    # Two workers, episodes of 1, 1, 1 and 5 s in turn: one plays 1 + 1, the other 1 + 5; 40 steps in 6 s.
    works = itertools.cycle([Work(1.0, 10), Work(1.0, 10), Work(1.0, 10), Work(5.0, 10)])
    rate = play_rounds(2, 0.0, 2.0, works.__next__, FREE, max_lag=0)
    assert rate.steps_per_second == pytest.approx(40 / 6)
    works = itertools.cycle([Work(1.0, 10), Work(1.0, 10), Work(1.0, 10), Work(5.0, 10)])
    ahead = play_rounds(2, 0.0, 2.0, works.__next__, FREE, max_lag=1)
    assert ahead.steps_per_second > 1.2 * rate.steps_per_second


def test_more_workers_than_a_round_has_episodes_are_of_no_use() -> None:
    four, forty = (play_rounds(n, 0.0, 2.0, lambda: Work(1.0, 10), FREE, 0).steps_per_second for n in (4, 40))
    assert four == pytest.approx(forty)


def test_segments_by_hand() -> None:
    # One collector, a unit of 100 steps a second; learning takes as long: twice as fast with lag.
    learning = Learning(Demand(steps=100), 0.01)
    slow, fast = (
        play_rounds(1, 1.0, 2.0, lambda: Work(1.0, 100), learning, lag, unit_steps=100).steps_per_second
        for lag in (0, 1)
    )
    assert (slow, fast) == pytest.approx((50.0, 100.0))


def test_environments_in_step_by_hand() -> None:
    # Two environments, four episodes of 10 steps: 20 steps of both at 1 s, two resets at 1 s, learning 40 × 0.1 s.
    learning = Learning(Demand(episodes=4), 0.1)
    rate = play_in_step(2, lambda: 10, [0.0, 1.0, 1.0], 1.0, learning)
    # The two of a pair end one after the other at the same step: the second reset finds only one to reset.
    assert 40 / 28 <= rate.steps_per_second <= 40 / 26


def test_environments_in_step_for_a_demand_in_parts_of_episodes() -> None:
    learning = Learning(Demand(steps=50, whole_episodes=False), 0.1)
    rate = play_in_step(2, lambda: 1_000_000, [0.0, 1.0, 1.0], 1.0, learning)
    assert rate.steps_per_second == pytest.approx(50 / (25 + 5), rel=1e-3)


def test_collectors_that_never_wait_are_held_up_by_the_slowest_of_three() -> None:
    assert never_waiting(4, 0.01, 0.0, 0.001, 2.0, False).steps_per_second == pytest.approx(400)
    assert never_waiting(4, 0.001, 0.0, 0.01, 2.0, False).steps_per_second == pytest.approx(100)
    # Faster than the learner: a quarter of a core refreshes the full queue, and the rest is for 20 ms a step.
    assert never_waiting(4, 0.01, 0.01, 0.01, 1.25, False).steps_per_second == pytest.approx(50)
    # In threads they share one core with the learner, however many there are.
    assert never_waiting(4, 0.01, 0.01, 0.01, 8.0, True).steps_per_second == pytest.approx(37.5)


def known(vectors: dict[str, tuple[float, float]]) -> Environment:
    return Environment(0.0, (0.1,), (0.01, 0.03), 0.5, 0.004, (10,), None, 1.0, vectors, None)


def test_a_collector_alone_takes_the_environment_its_share_of_a_reset_and_the_loop() -> None:
    wall, cpu = vector_seconds(known({}), 1)
    assert wall == pytest.approx(0.02 + 0.1 / 10 + 0.004)
    assert cpu == pytest.approx(0.5 * 0.03 + 0.004)
    assert vector_seconds(known({}), 64) == (wall, cpu), "nothing else is known"


def test_between_sizes_that_were_measured_a_step_of_all_is_a_line() -> None:
    # a + b·n: 34 ms for one and 640 ms for 64, so per step it is linear in 1/n.
    wall, _ = vector_seconds(known({"64": (0.010, 0.010)}), 2)
    a, b = np.linalg.solve([[1, 1], [1, 64]], [0.034, 0.640])
    assert wall == pytest.approx((a + 2 * b) / 2)


def test_time_that_others_had_the_core_is_no_property_of_an_environment() -> None:
    # Half of the time others had the core: steps of 20 ms and a share of 10 ms of a reset, and 4 ms around them.
    busy = dataclasses.replace(known({"4": (0.05, 0.01)}), stolen_share=0.5, cpu_share=1.0)
    assert vector_seconds(busy, 1) == pytest.approx((0.017, 0.017))
    assert vector_seconds(busy, 4) == pytest.approx((0.01, 0.01)), "it only computes, so it waited for others alone"
    known_cpu = dataclasses.replace(busy, cpu_seconds=0.012)
    assert vector_seconds(known_cpu, 1) == pytest.approx((0.012, 0.012)), "the kernel did not see all of it"
    assert vector_seconds(dataclasses.replace(busy, cpu_share=0.5), 4) == pytest.approx((0.05, 0.01)), "it may sleep"


def test_steps_of_more_environments_at_once_go_on_as_the_last_two_sizes_do() -> None:
    measured = {"1": 1.0, "2": 3.0, "6": 5.0}
    assert [line(measured, size) for size in (1, 2, 4, 6, 10)] == pytest.approx([1.0, 3.0, 4.0, 5.0, 7.0])
    assert line({"1": 1.0, "2": 3.0, "6": 2.0}, 100) == 2.0, "noise must not make more cheaper"
