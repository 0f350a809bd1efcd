"""What the tuner does with sequences of windows that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freerun.core import Tunable
from freerun.tuning.observation import Observation, pool
from freerun.tuning.rules import Aim, Circumstances, suggestions
from freerun.tuning.tuner import MAX_WINDOWS, REST_WINDOWS, Change, Tuner

HUNGRY = Observation(3.0, 200.0, noise=0.01, learner_waiting=0.7, cpu=0.4)
"""The learner waits, workers are busy, cores are idle: more workers, twice as many."""
FED = Observation(3.0, 1000.0, noise=0.01, learner_waiting=0.02, workers_busy=0.9, cpu=0.6)
"""Nothing to do."""
IDLE = Observation(3.0, 1000.0, noise=0.01, workers_busy=0.1, workers_waiting_for_weights=0.9, cpu=0.6)
"""The learner never waits, workers wait 90 %: a quarter of them will do."""
TWO_CORES = Circumstances(num_cores=2)


def tunable(name: str, value: float, low: float, high: float, is_whole: bool = True) -> Tunable:
    """The tuner reads a value only once, and leaves it to others to apply one."""
    return Tunable(name, lambda: value, lambda wanted: None, low, high, is_whole)


def tuner(num_workers: float, most: float = 64.0, **queue: float) -> Tuner:
    tunables = [tunable("num_workers", num_workers, 1, most)]
    if queue:
        tunables.append(tunable("queue_size", queue["size"], 1, 64))
    return Tuner(tunables, TWO_CORES)


def at(rate: float, seen: Observation = HUNGRY) -> Observation:
    return replace(seen, steps_per_second=rate)


def told(changes: list[Change]) -> list[tuple[str, str, float, float]]:
    return [(change.kind, change.name, change.old, change.new) for change in changes]


def test_it_climbs_by_doubling_while_each_step_helps_and_goes_back_from_the_one_that_does_not() -> None:
    made = tuner(2)
    assert told(made.observe(at(200))) == [("try", "num_workers", 2, 4)]
    assert told(made.observe(at(400))) == [("keep", "num_workers", 2, 4), ("try", "num_workers", 4, 8)]
    assert told(made.observe(at(800))) == [("keep", "num_workers", 4, 8), ("try", "num_workers", 8, 16)]
    assert told(made.observe(at(700))) == [("undo", "num_workers", 16, 8)]
    assert told(made.observe(at(800))) == [("try", "num_workers", 8, 11)]  # halfway, as factors go: √(8 · 16) = 11.3
    (kept,) = made.observe(at(900))  # and no further: √(11 · 16) = 13 is hardly a move
    assert told([kept]) == [("keep", "num_workers", 8, 11)]
    assert kept.effect is not None
    assert kept.effect.gain == pytest.approx(900 / 800 - 1)
    assert "waits 70%" in kept.reason
    assert made.observe(at(900)) == []


def test_it_goes_four_times_as_far_where_nearly_nothing_is_done() -> None:
    made = tuner(2)
    idle = replace(HUNGRY, learner_waiting=0.95, cpu=0.05)
    assert told(made.observe(idle)) == [("try", "num_workers", 2, 8)]


def test_a_gain_within_the_noise_is_looked_at_three_times_and_then_undone() -> None:
    made = tuner(4)
    noisy = replace(HUNGRY, noise=0.05)  # two standard errors of the difference: 2 · √2 · 5 % = 14 %
    assert told(made.observe(at(1000, noisy))) == [("try", "num_workers", 4, 8)]
    assert made.observe(at(1050, noisy)) == []
    assert made.observe(at(1050, noisy)) == []
    assert told(made.observe(at(1050, noisy))) == [("undo", "num_workers", 8, 4)]
    assert MAX_WINDOWS == 3


def test_a_gain_that_shows_after_a_while_is_kept() -> None:
    made = tuner(4)
    noisy = replace(HUNGRY, noise=0.04)
    made.observe(at(1000, noisy))  # noise before: 4 %
    assert made.observe(at(1100, noisy)) == []  # 10 % of 2 · √(4² + 4²) = 11.3 %
    kept, *_ = made.observe(at(1100, noisy))  # 10 % of 2 · √(4² + 8/2²) = 9.8 %
    assert told([kept]) == [("keep", "num_workers", 4, 8)]


def test_what_was_undone_is_left_alone_for_a_while_and_twice_as_long_the_next_time() -> None:
    made = tuner(1, most=2)
    assert told(made.observe(at(1000))) == [("try", "num_workers", 1, 2)]
    tried_after = []
    for _ in range(2):
        assert told(made.observe(at(900))) == [("undo", "num_workers", 2, 1)]
        windows = 1
        while not made.observe(at(1000)):
            windows += 1
        tried_after.append(windows)
    assert tried_after == [REST_WINDOWS, 2 * REST_WINDOWS]


def test_fewer_workers_that_do_as_much_are_kept_down_to_where_it_costs_something() -> None:
    made = tuner(64)
    assert told(made.observe(IDLE)) == [("try", "num_workers", 64, 16)]
    assert told(made.observe(at(1000, IDLE))) == [("keep", "num_workers", 64, 16), ("try", "num_workers", 16, 4)]
    assert told(made.observe(at(900, IDLE))) == [("undo", "num_workers", 4, 16)]
    assert told(made.observe(at(1000, IDLE))) == [("try", "num_workers", 16, 8)]
    assert made.observe(at(990, IDLE)) == []  # 1 % less may be noise
    assert made.observe(at(990, IDLE)) == []
    assert told(made.observe(at(990, IDLE)))[0] == ("keep", "num_workers", 16, 8)


def test_many_small_losses_are_not_taken_for_none() -> None:
    made = tuner(64)
    rate, lost = 1000.0, replace(IDLE, noise=0.0)
    made.observe(at(rate, lost))
    while made.trial is not None:
        rate *= 0.985
        before = made.values["num_workers"]
        for _ in range(MAX_WINDOWS):
            made.observe(at(rate, lost))
            if made.values["num_workers"] != before:
                break
    assert rate > 0.93 * 1000


def test_a_queue_that_is_too_short_grows() -> None:
    made = tuner(4, size=1)
    dropping = replace(HUNGRY, dropped=0.5, queue_fill=0.9)
    (tried,) = made.observe(dropping)
    assert told([tried]) == [("try", "queue_size", 1, 16)]
    assert tried.reason == "the learner waits 70% for data while 50% of the steps are dropped"


def test_a_queue_that_is_mostly_empty_shrinks_into_its_band_if_that_costs_nothing() -> None:
    made = tuner(4, size=64)
    empty = replace(FED, queue_fill=0.2)
    assert told(made.observe(empty)) == [("try", "queue_size", 64, 32)]
    after = replace(FED, queue_fill=0.4)
    assert told(made.observe(after))[0] == ("keep", "queue_size", 64, 32)
    # The next half goes past the band: 15 % off on the other side, where it was 10 %.
    assert told(made.observe(replace(FED, queue_fill=0.95))) == [("undo", "queue_size", 16, 32)]


def test_a_move_that_does_harm_is_turned_back_at_once_and_not_tried_again_soon() -> None:
    made = tuner(2)
    assert made.abandon("workers failed") == []
    made.observe(at(200))
    (undone,) = made.abandon("3 worker failures since the change")
    assert told([undone]) == [("undo", "num_workers", 4, 2)]
    assert undone.reason == "3 worker failures since the change"
    assert undone.effect is None
    assert told(made.observe(at(200))) == [("try", "num_workers", 2, 3)]


def test_nothing_is_done_where_nothing_is_wrong() -> None:
    made = tuner(4, size=16)
    assert [made.observe(replace(FED, queue_fill=0.6)) for _ in range(50)] == [[]] * 50


def test_old_data_makes_a_queue_without_a_limit_shorter() -> None:
    values = {"queue_size": 64.0}
    stale = replace(FED, lag=9.0, queue_fill=0.7)
    (found,) = suggestions(stale, values, Circumstances(2, lag_budget=1))
    assert (found.name, found.factor, found.aim) == ("queue_size", 0.5, Aim.LAG)
    assert list(suggestions(stale, values, TWO_CORES)) == []


def test_learning_tunables_are_changed_only_where_they_were_declared() -> None:
    busy = replace(FED, learner_waiting=0.0, buffer_fill=0.8)
    assert list(suggestions(busy, {"num_workers": 2}, TWO_CORES)) == []
    declared = {"minibatch": 64, "update_ratio": 1.0}
    found = list(suggestions(busy, declared, TWO_CORES))
    assert [(each.name, each.factor) for each in found] == [("minibatch", 2), ("update_ratio", 0.75)]
    filling = replace(busy, buffer_fill=0.5)  # data is what is missing
    assert [each.name for each in suggestions(filling, declared, TWO_CORES)] == ["minibatch"]


def test_windows_that_disagree_are_noise() -> None:
    pooled = pool([Observation(3.0, 900.0, noise=0.01), Observation(3.0, 1100.0, noise=0.01)])
    assert pooled.steps_per_second == 1000.0
    assert pooled.noise == pytest.approx(0.1)  # √((100² + 100²) / (2 · 1)) / 1000
    assert pooled.seconds == 6.0


def test_a_tunable_keeps_to_its_bounds() -> None:
    assert tunable("a", 3, 1, 10).scaled(3, 2) == 6
    assert tunable("a", 3, 1, 5).scaled(3, 2) == 5
    assert tunable("a", 3, 1, 5).scaled(3, 0.5) == 1
    assert tunable("a", 1.0, 0.5, 2.0, is_whole=False).scaled(1.0, 0.75) == 0.75
    with pytest.raises(ValueError, match="does not lie between"):
        Tuner([tunable("a", 3, 4, 5)], TWO_CORES)


def test_a_change_that_the_bounds_leave_no_room_for_gives_way_to_the_next() -> None:
    made = Tuner([tunable("minibatch", 64, 64, 64), tunable("update_ratio", 1.0, 0.5, 1.0, False)], TWO_CORES)
    assert told(made.observe(replace(FED, learner_waiting=0.0))) == [("try", "update_ratio", 1.0, 0.75)]


def plant(num_workers: float) -> Observation:
    """A run on two cores: a worker brings 100 steps/s and takes 1 % of a core; the learner takes 3000 at most."""
    offered, taken = 100 * num_workers, min(100 * num_workers, 3000)
    idle = 1 - taken / offered
    return Observation(
        3.0,
        taken,
        noise=0.02,
        learner_waiting=1 - taken / 3000,
        workers_busy=1 - idle,
        workers_waiting_for_weights=idle,
        cpu=0.01 * num_workers / 2 + 0.5 * taken / 3000,
    )


@pytest.mark.parametrize("num_workers", [1, 2, 64])
def test_a_run_comes_near_its_best_within_a_dozen_windows_and_rests_there(num_workers: float) -> None:
    made = tuner(num_workers)
    for _ in range(12):
        made.observe(plant(made.values["num_workers"]))
    for _ in range(30):
        assert plant(made.values["num_workers"]).steps_per_second >= 0.9 * 3000 or made.trial is not None
        made.observe(plant(made.values["num_workers"]))
    assert made.trial is None
    assert 27 <= made.values["num_workers"] <= 40
