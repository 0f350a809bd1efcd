"""When a window has seen enough, and what it says then."""

from __future__ import annotations

import pytest

from freerun.core import State
from freerun.tuning.windows import RunSample, UpdateSample, Window, rate_of


def sample(at: float, steps: int, units: int = 0, waiting: float = 0.0, **more: float) -> RunSample:
    learner, workers = [0.0] * len(State), [0.0] * len(State)
    learner[State.WAITING_FOR_DATA], learner[State.BUSY] = waiting, at - waiting
    workers[State.BUSY], workers[State.WAITING_FOR_WEIGHTS] = 1.5 * at, 0.5 * at
    workers[State.PARKED] = 10 * at
    return RunSample(at, steps, units, int(more.get("dropped", 0)), learner, workers, 0.5, more.get("queue_fill"))


def test_the_rate_is_that_of_the_whole_and_its_error_that_of_the_pieces() -> None:
    assert rate_of([(0.0, 0), (1.0, 100), (2.0, 200)]) == (100.0, 0.0)
    rate, noise = rate_of([(0.0, 0), (1.0, 90), (2.0, 200)])
    assert rate == 100.0
    assert noise == pytest.approx((200 * 2 / 1) ** 0.5 / 2 / 100)  # √((10² + 10²) · 2 / 1) / 2 s, as a share of 100
    assert rate_of([(0.0, 0), (1.0, 100), (3.0, 300)]) == (100.0, 0.0)  # a long piece is no faster than a short one


def test_while_the_learner_mostly_waits_a_window_ends_when_it_is_long_enough() -> None:
    window = Window(3.0)
    for tick in range(7):
        window.add(sample(tick / 2, 100 * tick, units=tick, waiting=0.4 * tick))
        assert window.close() is None or tick == 6
    seen = window.close()
    assert seen is not None
    assert seen.steps_per_second == 200.0
    assert seen.learner_waiting == pytest.approx(0.8)
    assert (seen.workers_busy, seen.workers_waiting_for_weights) == (0.75, 0.25)  # parked ones do not count


def test_where_the_learner_is_busy_a_window_reaches_from_update_to_update() -> None:
    window = Window(3.0)
    for tick in range(13):
        window.add(sample(tick / 2, 100 * tick, units=tick))  # never waits
        if tick in (1, 3, 5, 7, 9):
            window.update(UpdateSample(tick / 2 + 0.1, 90 * (tick // 2), 0.5, 0.25))
        seen = window.close()
        assert (seen is not None) == (tick >= 9)
        if seen is not None:
            break
    assert seen is not None
    assert seen.steps_per_second == pytest.approx(90.0)  # 4 turns of a second, 90 steps each
    assert (seen.lag, seen.buffer_fill) == (0.5, 0.25)


def test_what_comes_one_by_one_is_awaited_a_little_longer() -> None:
    window = Window(3.0)
    ended = []
    for tick in range(25):
        window.add(sample(tick / 2, 100 * (tick // 3), units=tick // 3, waiting=tick / 2))
        ended.append(window.close() is not None)
    assert ended.index(True) == 18  # six units after nine seconds


def test_a_window_ends_at_last_whatever_it_holds() -> None:
    window = Window(1.0)
    for tick in range(9):
        window.add(sample(tick / 2, 10 * tick, units=1))
    seen = window.close()
    assert seen is not None
    assert seen.steps_per_second == 20.0
