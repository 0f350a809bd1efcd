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


def sleeps(env: Straggler, seed: int, slept: list[float]) -> list[float]:
    """Play an episode; return how long each step has slept, by what was added to `slept`."""
    env.reset(seed=seed)
    slept.clear()
    truncated = False
    while not truncated:
        _, _, _, truncated, _ = env.step(np.int64(0))
    return slept.copy()


def test_step_times_and_lengths_are_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    env = Straggler()
    episodes = [sleeps(env, seed, slept) for seed in range(400)]
    seconds, lengths = np.concatenate(episodes), [len(episode) for episode in episodes]
    assert sleeps(Straggler(), 4, slept) == episodes[4]
    assert np.mean(seconds) == pytest.approx(0.010, rel=0.02)
    assert np.max(seconds) <= 0.050
    assert np.quantile(seconds, 0.999) == pytest.approx(0.050, rel=0.05)
    assert (min(lengths), max(lengths)) == (95, 103)


def test_same_seed_same_episode() -> None:
    one, other = Straggler(1e-6, 2e-6), Straggler(1e-6, 2e-6)
    np.testing.assert_array_equal(one.reset(seed=4)[0], other.reset(seed=4)[0])
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
    busy_seconds = 0.002
    env = Straggler(busy_seconds, busy_seconds, kind="busy")
    env.reset(seed=0)
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
