"""The built-in slow, uneven environment is as slow and as uneven as it says."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import freerun.adapters.catalog  # noqa: F401
from freerun.core import UserError
from freerun_envs.straggler import Straggler


def test_step_times_and_lengths_are_as_described() -> None:
    env = Straggler()
    seconds, lengths = [], []
    for seed in range(400):
        env.reset(seed=seed)
        seconds += env._seconds
        lengths.append(len(env._seconds))
    assert np.mean(seconds) == pytest.approx(0.010, rel=0.02)
    assert np.max(seconds) <= 0.050
    assert np.quantile(seconds, 0.999) == pytest.approx(0.050, rel=0.05)
    assert (min(lengths), max(lengths)) == (95, 103)


def test_same_seed_same_episode() -> None:
    one, other = Straggler(1e-6, 2e-6), Straggler(1e-6, 2e-6)
    np.testing.assert_array_equal(one.reset(seed=4)[0], other.reset(seed=4)[0])
    assert one._seconds == other._seconds
    for action in range(90):
        first, second = one.step(np.int64(action)), other.step(np.int64(action))
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1:] == second[1:]


def test_the_action_that_is_shown_earns_the_reward() -> None:
    env = Straggler(1e-6, 2e-6)
    obs, _ = env.reset(seed=0)
    total, truncated = 0.0, False
    while not truncated:
        obs, reward, terminated, truncated, _ = env.step(np.int64(obs.argmax()))
        assert not terminated
        total += reward
    assert total >= 95


def test_busy_kind_uses_the_processor() -> None:
    env = Straggler(0.002, 0.004, kind="busy")
    env.reset(seed=0)
    busy_seconds = env._seconds[-1]
    before = time.process_time()
    env.step(np.int64(0))
    assert time.process_time() - before >= 0.9 * busy_seconds


def test_gymnasium_finds_no_fault() -> None:
    check_env(gymnasium.make("freerun/Straggler-v0", mean_seconds=1e-6, tail_seconds=2e-6).unwrapped)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="mean_seconds"):
        Straggler(mean_seconds=0.1, tail_seconds=0.01)
    with pytest.raises(UserError, match="kind"):
        Straggler(kind="fast")  # type: ignore[arg-type]
