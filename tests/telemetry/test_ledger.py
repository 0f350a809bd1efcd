"""The ledger counts what was handed over and what was trained, and its sums balance."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from freerun.core import Counts, Segment
from freerun.telemetry.ledger import Ledger


def segment(rewards: list[list[float]], ends: list[list[int]], episodes: list[list[int]], version: int = 0) -> Segment:
    """Rows are steps, columns are environments."""
    reward = np.array(rewards, np.float32)
    terminated = np.array(ends, np.bool_)
    zeros = np.zeros(reward.shape, np.float32)
    return Segment(
        obs=zeros,
        action=zeros,
        log_prob=zeros,
        reward=reward,
        terminated=terminated,
        truncated=np.zeros_like(terminated),
        next_obs=zeros,
        version=np.full(reward.shape, version),
        episode=np.array(episodes),
        seconds=0.0,
    )


def test_returns_do_not_leak_from_one_episode_into_the_next() -> None:
    ledger = Ledger()
    # Column 0: episode 0 earns 1 + 2, then episode 2 earns 30 and goes on. Column 1: episode 1 goes on.
    ledger.account([segment([[1, 10], [2, 20], [30, 40]], [[0, 0], [1, 0], [0, 0]], [[0, 1], [0, 1], [2, 1]])])
    assert (ledger.steps, ledger.episodes, ledger.mean_return, ledger.mean_length) == (6, 1, 3.0, 2.0)
    ledger.account([segment([[5, 50]], [[1, 1]], [[2, 1]])])
    assert ledger.episodes == 3
    assert ledger.mean_return == pytest.approx((3 + 35 + 120) / 3)
    assert ledger.mean_length == pytest.approx((2 + 2 + 4) / 3)


def test_lag_is_counted_from_the_version_of_each_step() -> None:
    ledger = Ledger()
    ledger.account([segment([[0]], [[1]], [[0]])])
    ledger.finish_update()
    ledger.finish_update()
    ledger.account([segment([[0], [0], [0]], [[0], [0], [1]], [[1], [1], [1]], version=0)])
    assert ledger.lag_max == 2
    assert ledger.lag_mean == pytest.approx(6 / 4)
    ledger.account([segment([[0]], [[1]], [[2]], version=2)])
    assert ledger.lag_metrics() == {"lag_mean": 1.5, "lag_max": 2.0, "lag_share/0": 0.25, "lag_share/2": 0.75}
    ledger.finish_update()
    assert ledger.lag_metrics() == {"lag_mean": 0.0, "lag_max": 0.0}


def test_a_ledger_that_does_not_balance_is_an_error() -> None:
    ledger = Ledger()
    ledger.account([segment([[0]], [[1]], [[0]])])
    ledger.check_balance(Counts(episodes_started=3, episodes_in_flight=2))
    ledger.finish_update()
    ledger.check_balance(Counts(episodes_started=4, episodes_in_flight=2, episodes_dropped=1))
    with pytest.raises(RuntimeError, match="does not balance"):
        ledger.check_balance(Counts(episodes_started=4, episodes_in_flight=2))


def test_an_episode_is_trained_once() -> None:
    ledger = Ledger()
    ledger.account([segment([[0]], [[1]], [[4]])])
    ledger.finish_update()
    ledger.account([segment([[0]], [[1]], [[4]])])
    with pytest.raises(RuntimeError, match="episode 4 was trained twice"):
        ledger.finish_update()


def test_file_says_what_each_update_learned_from() -> None:
    file = io.StringIO()
    ledger = Ledger(file)
    ledger.account([segment([[0], [0]], [[0], [1]], [[0], [0]])])
    ledger.finish_update()
    ledger.account([segment([[0]], [[1]], [[1]], version=1)])
    ledger.finish_update(progress=0.5)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == [
        {"update": 1, "progress": 0.0, "segments": [[[[0, 2, 0]]]]},
        {"update": 2, "progress": 0.5, "segments": [[[[1, 1, 1]]]]},
    ]
    assert ledger.summary(Counts())["episodes_by_length"] == {"1": 1, "2": 1}
