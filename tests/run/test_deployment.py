"""A trained policy acts: on one observation or many, of any space, as it did in training, and with numpy alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import freerun
from freerun.core import HeldOutSeed, Purpose, UserError, episode_seed

SOURCE = Path(freerun.__file__).parent.parent
QUICK: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "quiet": True, "mode": "sequential"}
SMALL_SAC: dict[str, Any] = {"algo": "sac", "learning_starts": 50, "steps_per_update": 50, "batch_size": 16}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("toy_envs:OneBit", {**QUICK, "env_args": {"kind": "discrete"}}),
    "multidiscrete": ("toy_envs:OneBit", {**QUICK, "env_args": {"kind": "multidiscrete"}}),
    "box": ("toy_envs:OneBit", {**QUICK, "env_args": {"kind": "box"}, "normalize_obs": True}),
    "dict": ("toy_envs:DictObs", {**QUICK, "normalize_obs": True}),
    "picture": ("toy_envs:Square", {**QUICK, "network": "toy_networks:cnn"}),
    "scaled": (
        "Pendulum-v1",
        {"mode": "sequential", "quiet": True, "total_steps": 100, "max_episode_steps": 30, **SMALL_SAC},
    ),
}
MAKE: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    **{kind: lambda kind=kind: toy_envs.OneBit(kind) for kind in ("discrete", "multidiscrete", "box")},  # type: ignore[misc]
    "dict": toy_envs.DictObs,
    "picture": toy_envs.Square,
    "scaled": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=30),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, (env, settings) in RUNS.items():
        freerun.train(env, run_dir=folder / name, hidden_sizes=(8,), **settings)
    return {name: folder / name for name in RUNS}


def observations(env: gymnasium.Env[Any, Any], number: int = 5) -> list[Any]:
    first, _ = env.reset(seed=3)
    found = [first]
    for _ in range(number - 1):
        obs, *_ = env.step(env.action_space.sample())
        found.append(obs)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_actions_can_be_given_to_the_environment_and_are_those_of_an_evaluation(
    name: str, runs: dict[str, Path]
) -> None:
    """A loop that a user might write gives the returns that `freerun eval` gives: what is clipped, scaled, flattened
    and normalised there is so here."""
    policy, env = freerun.load_policy(runs[name]), MAKE[name]()
    assert policy.observation_space == env.observation_space
    assert policy.action_space == env.action_space
    returns = []
    for episode in range(3):
        obs, _ = env.reset(seed=episode_seed(HeldOutSeed(7, Purpose.EVALUATION), episode))
        total, ended = 0.0, False
        while not ended:
            action = policy.predict(obs)
            assert env.action_space.contains(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    assert freerun.evaluate(runs[name], episodes=3, seed=7).returns == pytest.approx(returns, rel=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_gives_the_actions_of_its_observations(name: str, runs: dict[str, Path]) -> None:
    policy, env = freerun.load_policy(runs[name]), MAKE[name]()
    single = observations(env)
    batch: Any = np.stack(single) if isinstance(single[0], np.ndarray) else single
    actions = policy.predict(batch)
    assert actions.shape == (5, *(env.action_space.shape or ()))
    assert actions.dtype == env.action_space.dtype
    np.testing.assert_allclose(actions, [policy(obs) for obs in single], rtol=1e-5, atol=1e-6)
    assert len(policy.predict(batch[:1])) == 1, "a batch of one is a batch"
    assert len(policy.predict(batch[:0])) == 0


def test_a_choice_is_a_whole_number(runs: dict[str, Path]) -> None:
    action = freerun.load_policy(runs["discrete"]).predict([0.0, 1.0])
    assert type(action) is int
    assert action in (5, 6)


def test_a_batch_of_dictionaries_may_be_a_dictionary_of_batches(runs: dict[str, Path]) -> None:
    policy = freerun.load_policy(runs["dict"])
    single = observations(toy_envs.DictObs())
    stacked = {name: np.stack([obs[name] for obs in single]) for name in single[0]}
    np.testing.assert_array_equal(policy.predict(stacked), policy.predict(single))
    flat = spaces.utils.flatten(toy_envs.DictObs().observation_space, single[0])
    expected = policy.actor.act(np.asarray(flat, np.float32)[None], None).action[0]
    assert policy.predict(single[0]) == expected


def test_actions_beyond_the_limits_are_clipped(runs: dict[str, Path]) -> None:
    policy = freerun.load_policy(runs["box"])
    policy.actor.load(policy.weights * 1000)
    action = policy.predict(np.array([1.0, 0.0]))
    assert action.shape == (1, 2)
    assert set(np.abs(action).ravel().tolist()) == {1.0}


def test_sampled_actions_follow_the_seed_and_the_probabilities(runs: dict[str, Path]) -> None:
    obs = np.tile([1.0, 0.0], (4000, 1))
    one, two = (freerun.load_policy(runs["discrete"], seed=3) for _ in range(2))
    sampled = one.predict(obs, deterministic=False)
    np.testing.assert_array_equal(sampled, two.predict(obs, deterministic=False))
    logits = one.actor.act(obs[:1].astype(np.float32), None).head[0].astype(float)
    expected = np.exp(logits[1]) / np.exp(logits).sum()
    assert (sampled == 6).mean() == pytest.approx(expected, abs=0.03)  # three deviations are 0.024
    one = freerun.load_policy(runs["discrete"], seed=4)
    single = [one.predict(row, deterministic=False) for row in obs[:50]]
    assert set(single) == {5, 6}


def test_a_wrong_call_is_told_what_to_use(runs: dict[str, Path]) -> None:
    policy = freerun.load_policy(runs["discrete"])
    with pytest.raises(UserError, match=r"call policy\.predict\(obs\)"):
        policy.act(np.zeros(2))
    wrong: Any
    for wrong in (np.zeros(3), np.zeros((2, 2, 2)), 1.0, None, "obs", {"a": 1}):
        with pytest.raises(UserError, match=r"takes an observation of Box.* or a batch of them"):
            policy.predict(wrong)
    policy = freerun.load_policy(runs["dict"])
    whole = observations(toy_envs.DictObs(), 1)[0]
    for wrong in ({"a": whole["a"]}, whole["a"], {**whole, "b": [0, 1]}, {**whole, "b": 7}, [[whole]]):
        with pytest.raises(UserError, match="takes an observation of Dict"):
            policy.predict(wrong)


def test_the_policy_of_a_result_acts_too_and_can_be_sent_elsewhere(run_dir: Path) -> None:
    result = freerun.train("CartPole-v1", run_dir=run_dir, **QUICK)
    obs = np.array([0.1, -0.2, 0.3, 0.4], np.float32)
    loaded = freerun.load_policy(run_dir)
    copied = pickle.loads(pickle.dumps(loaded))
    assert result.policy.predict(obs) == loaded.predict(obs) == copied.predict(obs)


# ---------------------------------------------------------------------------------------------- where it is used

ELSEWHERE = """
import sys
import freerun
for checkpoint in (None, "best", "newest"):
    policy = freerun.load_policy("run", checkpoint)
    assert policy.predict([1.0, 0.0]) in (5, 6)
    assert policy.predict([1.0, 0.0], deterministic=False) in (5, 6)
    assert policy([[1.0, 0.0]] * 3).shape == (3,)
assert "torch" not in sys.modules, "an MLP is numpy"
assert "toy_envs" not in sys.modules
"""


def test_it_needs_neither_torch_nor_the_environment(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(runs["discrete"])
    bare = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(tmp_path / "somebody else")}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def described(run_dir: Path) -> dict[str, Any]:
    with safe_open(run_dir / "policy.safetensors", "numpy") as file:
        about: dict[str, Any] = json.loads(file.metadata()["freerun"])
    return about


def describe_again(run_dir: Path, about: Any) -> None:
    path = run_dir / "policy.safetensors"
    save_file(load_file(path), path, {"freerun": about if isinstance(about, str) else json.dumps(about)})


@pytest.fixture
def own_run(run_dir: Path) -> Path:
    freerun.train("toy_envs:OneBit", run_dir=run_dir, **QUICK)
    return run_dir


def test_a_folder_of_an_older_version_is_loaded_by_building_its_environment(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = described(own_run)
    del about["spaces"]
    describe_again(own_run, about)
    assert freerun.load_policy(own_run).predict([0.0, 1.0]) in (5, 6)
    assert freerun.evaluate(own_run, episodes=1).lengths == [10]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    with pytest.raises(UserError, match="names code to run: toy_envs:OneBit"):
        freerun.load_policy(own_run)
    assert freerun.load_policy(own_run, trust=["toy_envs:OneBit"]).predict([0.0, 1.0]) in (5, 6)


HUGE = {"kind": "Box", "shape": [1 << 40], "dtype": "float32", "low": 0, "high": 1}


@pytest.mark.parametrize("wrong", [[HUGE, HUGE], "Box", [], {"kind": "Tuple"}])
def test_spaces_that_nobody_wrote_are_refused(wrong: Any, own_run: Path) -> None:
    describe_again(own_run, {**described(own_run), "spaces": wrong})
    with pytest.raises(UserError, match="is not a policy that freerun wrote: its spaces are invalid"):
        freerun.load_policy(own_run)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_a_description_that_is_none_is_refused(text: str, own_run: Path) -> None:
    describe_again(own_run, text)
    with pytest.raises(UserError, match="is not a policy that"):
        freerun.load_policy(own_run)


def test_a_network_and_spaces_that_do_not_fit_are_refused(own_run: Path, runs: dict[str, Path]) -> None:
    describe_again(own_run, {**described(own_run), "spaces": described(runs["dict"])["spaces"]})
    with pytest.raises(UserError, match="does not fit the spaces of its environment"):
        freerun.load_policy(own_run)
