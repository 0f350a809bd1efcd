"""A run that was stopped goes on as if it never had been: every algorithm, every mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.settings import registry

WHOLE = [name for name, mode in registry.MODES.items() if mode.traits.whole_episodes]
SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "total_episodes": 80,
    "minibatch_size": 128,
    "num_epochs": 2,
    "seed": 5,
    "quiet": True,
    "deterministic": True,
    "normalize_obs": True,
    "normalize_reward": True,
    "hidden_sizes": (16,),
    "steps_per_update": 300,
}
SMALL: dict[str, Any] = {"hidden_sizes": (16, 16), "batch_size": 32, "learning_starts": 200, "steps_per_update": 100}
OFF_POLICY: dict[str, dict[str, Any]] = {
    # The correction rises over the run, which these runs lengthen when they go on: from 1 it cannot rise.
    "sac": {**SMALL, "buffer_size": 500, "replay": "prioritised", "priority_correction": 1.0},
    "fastsac": {**SMALL, "buffer_size": 500},
    "dqn": {**SMALL, "buffer_size": 500, "target_rate": 1.0, "target_interval": 70, "epsilon_steps": 700},
    "mbpo": {
        **SMALL,
        "updates_per_step": 1.0,
        "rollouts_per_step": 10.0,
        "model_hidden_sizes": (16, 16),
        "steps_per_model_training": 200,
        "model_updates_per_step": 0.5,
        "model_steps_kept": 50,
    },
}
NEXT = {"sequential": "pipes", "sync": "freerun", "pipes": "executor", "executor": "sequential", "freerun": "sync"}


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock says."""
    return {name: value for name, value in line.items() if not name.endswith(("second", "seconds", "share", "percent"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> freerun.Result:
    return freerun.train(**SETTINGS, mode="sequential", run_dir=tmp_path_factory.mktemp("reference") / "run")


@pytest.mark.parametrize("mode", WHOLE)
def test_a_resumed_run_ends_at_the_weights_of_one_that_was_not_interrupted(
    mode: str, undisturbed: freerun.Result, run_dir: Path
) -> None:
    """Stopped twice; goes on with other workers, then in another mode."""
    workers = 1 if mode == "sequential" else 2
    first = freerun.train(**{**SETTINGS, "total_episodes": 20}, mode=mode, num_workers=workers, run_dir=run_dir)
    assert first.summary["updates"] < undisturbed.summary["updates"]
    freerun.resume(run_dir, total_episodes=45, **({} if mode == "sequential" else {"num_workers": 3}))
    last = freerun.resume(run_dir, total_episodes=80, mode=NEXT.get(mode, "pipes"))
    np.testing.assert_array_equal(last.policy.weights, undisturbed.policy.weights)
    for name in ("env_steps", "episodes", "updates", "mean_return", "ledger"):
        assert last.summary[name] == undisturbed.summary[name], name
    for name in ("metrics.jsonl", "ledger.jsonl"):
        expected, actual = lines(undisturbed.run_dir, name), lines(run_dir, name)
        for line in (*expected, *actual):
            line.pop("progress")  # of another total
        assert [timeless(line) for line in actual] == [timeless(line) for line in expected]


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_replay_buffers_and_models_go_on_too(algo: str, tmp_path: Path) -> None:
    settings = {"algo": algo, "deterministic": True, "quiet": True, "seed": 3, "max_episode_steps": 100}
    settings |= {"env": "MountainCar-v0" if algo == "dqn" else "Pendulum-v1", **OFF_POLICY[algo]}
    whole = freerun.train(**settings, mode="sequential", total_steps=900, run_dir=tmp_path / "whole")
    run_dir = tmp_path / "run"
    freerun.train(**settings, mode="pipes", num_workers=2, total_steps=300, run_dir=run_dir)
    freerun.resume(run_dir, total_steps=600, checkpoint_every="200")
    last = freerun.resume(run_dir, total_steps=900, mode="sequential")
    np.testing.assert_array_equal(last.policy.weights, whole.policy.weights)
    ours, theirs = (lines(path, "metrics.jsonl") for path in (run_dir, tmp_path / "whole"))
    assert [line["critic_loss"] for line in ours] == [line["critic_loss"] for line in theirs]


@pytest.mark.parametrize("mode", [name for name, mode in registry.MODES.items() if not mode.traits.takes_turns])
def test_with_lag_the_books_go_on(mode: str, run_dir: Path) -> None:
    """What was under way is run again, or stays cut where it was; the sums balance after every update."""
    own: dict[str, Any] = {"num_workers": 2}
    if mode == "continuous":
        own = {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 32, "collector_kind": "thread"}
    if mode == "batch":
        own = {"num_envs": 4, "num_steps_per_env": 16}
    settings = {"steps_per_update": 200, "num_epochs": 1, "hidden_sizes": (8,), "quiet": True}
    first = freerun.train("CartPole-v1", mode=mode, total_steps=1000, run_dir=run_dir, **settings, **own)
    last = freerun.resume(run_dir, total_steps=2000)
    assert last.summary["updates"] > first.summary["updates"]
    assert last.summary["env_steps"] >= 2000
    assert last.summary["lag_max"] <= max(first.summary["lag_max"], 4) or mode == "continuous"
    books = last.summary["ledger"]
    others = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    assert books["started"] == sum(books[name] for name in others)
    assert books["trained"] > first.summary["ledger"]["trained"]
    steps = [line["step"] for line in lines(run_dir, "metrics.jsonl")]
    assert steps == sorted(set(steps))
    updates = [line["update"] for line in lines(run_dir, "ledger.jsonl")]
    assert updates == list(range(1, last.summary["updates"] + 1))
