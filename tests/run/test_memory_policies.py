"""Trained policies with a memory: to act with, to evaluate, to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import freerun
from freerun.core import HeldOutSeed, Purpose, UserError, episode_seed
from freerun.tools.cli.main import main

QUICK: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "quiet": True, "mode": "sequential"}
MEMORY: dict[str, Any] = {"memory": "lstm", "memory_size": 6, **QUICK}


@pytest.fixture(scope="module")
def maze_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("maze") / "run"
    freerun.train("freerun/TMaze-v0", run_dir=run_dir, **MEMORY)
    return run_dir


def test_predict_changes_the_memory_that_it_is_given(maze_run: Path) -> None:
    policy = freerun.load_policy(maze_run)
    env = gymnasium.make("freerun/TMaze-v0")
    obs, _ = env.reset(seed=0)
    memory = policy.new_memory()
    assert memory.shape == (policy.memory_size,) == (12,)
    policy.predict(obs, memory=memory)
    assert memory.any()
    # One after another, and side by side.
    first, both = policy.new_memory(), policy.new_memory(2)
    for _ in range(3):
        logits = policy.logits(obs, memory=first)
        together = policy.logits(np.stack([obs, obs]), memory=both)
    np.testing.assert_allclose(together, np.stack([logits, logits]), rtol=1e-5)
    np.testing.assert_allclose(both[1], first, rtol=1e-5)


def test_predict_insists_on_the_memory_and_on_its_shape(maze_run: Path) -> None:
    policy, obs = freerun.load_policy(maze_run), np.zeros(2, np.float32)
    with pytest.raises(UserError, match=r"trained with --memory: give predict\(obs, memory=memory\)"):
        policy.predict(obs)
    for wrong in (np.zeros(5, np.float32), np.zeros(12), np.zeros((2, 12), np.float32), [0.0] * 12):
        with pytest.raises(UserError, match=r"float32 of shape \(1, 12\)"):
            policy.predict(obs, memory=wrong)


def test_a_policy_without_a_memory_takes_none(run_dir: Path) -> None:
    policy = freerun.train("freerun/TMaze-v0", run_dir=run_dir, **QUICK).policy
    assert policy.memory_size == 0
    with pytest.raises(UserError, match="trained without --memory: leave memory out"):
        policy.predict(np.zeros(2), memory=np.zeros(4, np.float32))
    with pytest.raises(UserError, match="it remembers nothing"):
        policy.new_memory()


def test_an_evaluation_remembers_within_episodes_alone(run_dir: Path) -> None:
    """The same as playing by hand, with an empty memory at the start of each episode."""
    policy = freerun.train("CartPole-v1", run_dir=run_dir, **MEMORY).policy
    env, seed, lengths = gymnasium.make("CartPole-v1"), HeldOutSeed(0, Purpose.EVALUATION), []
    for number in range(5):
        obs, _ = env.reset(seed=episode_seed(seed, number))
        memory, num_steps, ended = policy.new_memory(), 0, False
        while not ended:
            obs, _, terminated, truncated, _ = env.step(policy.predict(obs, memory=memory))
            num_steps, ended = num_steps + 1, terminated or truncated
        lengths.append(num_steps)
    assert freerun.evaluate(run_dir, episodes=5).lengths == lengths


def test_a_run_starts_from_another_with_the_same_memory(maze_run: Path, tmp_path: Path) -> None:
    freerun.train("freerun/TMaze-v0", run_dir=tmp_path / "next", init_from=maze_run, **MEMORY)
    for settings, sentence in (
        ({"memory": "gru"}, "give --memory lstm as that run did"),
        ({"memory_size": 7}, "give --memory-size 6 as that run did"),
        ({"memory": "none"}, "give --memory lstm as that run did"),
    ):
        with pytest.raises(UserError, match=sentence):
            freerun.train("freerun/TMaze-v0", run_dir=tmp_path / "x", init_from=maze_run, **{**MEMORY, **settings})
    freerun.train("freerun/TMaze-v0", run_dir=tmp_path / "plain", **QUICK)
    with pytest.raises(UserError, match="give no --memory as that run did"):
        freerun.train("freerun/TMaze-v0", run_dir=tmp_path / "x", init_from=tmp_path / "plain", **MEMORY)


def test_the_flag_belongs_to_ppo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "Pendulum-v1", "--algo", "sac", "--memory", "gru"]) == 2
    assert "'memory': it belongs to --algo ppo" in capsys.readouterr().err
