"""Vector environments of others in the modes, from training to evaluation: nothing is lost, and no reset is a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.collecting.modes.inline_collector import InlineCollector
from freerun.core import CollectorSettings, EnvFactory, ModeTraits, Pacing, Policy, UserError, WorkerLocation
from freerun.run.replay_run import replay
from freerun.tools.cli.main import main

SETTINGS: dict[str, Any] = {"num_epochs": 1, "hidden_sizes": (8,), "quiet": True, "steps_per_update": 64}
OF_MODE: dict[str, dict[str, Any]] = {
    "freerun": {"num_workers": 2, "envs_per_worker": 4, "segment_steps": 9},
    "ray": {"num_workers": 2, "envs_per_worker": 4, "segment_steps": 9},
    "batch": {"num_envs": 4, "num_steps_per_env": 9},
    "continuous": {"num_collectors": 2, "num_envs": 8, "collection_batch_size": 32},
}


@pytest.mark.parametrize("reset", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("mode", OF_MODE)
def test_the_books_balance_and_no_reset_counts_as_a_step(mode: str, reset: str, run_dir: Path) -> None:
    """Environment k of a worker has episodes of 2 + k steps, so any other length would contain a row too many."""
    result = freerun.train(
        "toy_vectors:Counting",
        env_args={"mode": reset},
        mode=mode,
        total_steps=1500,
        run_dir=run_dir,
        **SETTINGS,
        **OF_MODE[mode],
    )
    ledger = result.summary["ledger"]
    if mode != "continuous":  # which drops steps, and with them the beginnings of episodes
        assert ledger["started"] == ledger["trained"] + ledger["handed_over_untrained"]
        assert set(ledger["episodes_by_length"]) == {"2", "3", "4", "5"}
    assert result.summary["env_steps"] >= 1500
    assert sum(ledger["steps_by_version"].values()) == result.summary["env_steps"]
    assert not (run_dir / "incidents.jsonl").exists()


class TogetherHere(InlineCollector):
    """All environments in the learner's thread, as in examples/own_mode.py."""

    traits = ModeTraits(workers=WorkerLocation.THIS_PROCESS, pacing=Pacing.TAKES_TURNS)

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        super().__init__(lambda: factory.make(settings.num_workers), policy, settings)


@pytest.mark.parametrize("reset", ["NEXT_STEP", "SAME_STEP"])
def test_a_mode_in_the_learner_s_thread_hands_over_steps_alone(reset: str, run_dir: Path) -> None:
    settings: dict[str, Any] = {"steps_per_update": 50, "learning_starts": 100, "batch_size": 16, "hidden_sizes": (8,)}
    result = freerun.train(
        "toy_vectors:Counting",
        env_args={"mode": reset},
        algo="dqn",
        mode=TogetherHere,
        num_workers=4,
        total_steps=600,
        quiet=True,
        run_dir=run_dir,
        **settings,
    )
    ledger = result.summary["ledger"]
    assert ledger["started"] == ledger["trained"] + ledger["handed_over_untrained"]
    assert set(ledger["episodes_by_length"]) == {"2", "3", "4", "5"}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_is_resumed_evaluated_and_exported(algo: str, run_dir: Path, tmp_path: Path) -> None:
    sizes = {"num_workers": 1, "envs_per_worker": 4, "segment_steps": 16}
    own: dict[str, Any] = {"learning_starts": 100} if algo == "dqn" else {"num_epochs": 1}
    freerun.train(
        "vector:CartPole-v1", algo=algo, total_steps=300, hidden_sizes=(8,), quiet=True, run_dir=run_dir, **sizes, **own
    )
    result = freerun.resume(run_dir, total_steps=600)
    assert result.summary["env_steps"] >= 600
    evaluation = freerun.evaluate(run_dir, episodes=3)
    assert freerun.evaluate(run_dir, episodes=3).returns == evaluation.returns  # one environment is seeded
    assert main(["export", str(run_dir), "--to", "numpy", "--output", str(tmp_path / "policy.npz")]) == 0
    with pytest.raises(
        UserError, match="only runs with one environment per worker, or with --deterministic, can be replayed"
    ):
        replay(run_dir)


def test_the_header_says_what_is_lost(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    freerun.train("toy_vectors:Counting", total_steps=64, run_dir=run_dir, **SETTINGS, **OF_MODE["freerun"])
    assert "starts its episodes by itself: only the first of each worker are seeded" in caplog.text


@pytest.mark.parametrize("own", [{"mode": "sequential"}, {"mode": "sync", "num_workers": 2}, {"num_workers": 2}])
def test_one_environment_per_worker_keeps_all_promises(own: dict[str, Any], run_dir: Path) -> None:
    """A vector of one environment starts every episode from its seed, whoever resets several of them."""
    settings: dict[str, Any] = {"env": "toy_vectors:synced", "deterministic": True, "total_episodes": 24, "seed": 5}
    settings |= {"episodes_per_update": 8, "num_epochs": 1, "hidden_sizes": (8,), "quiet": True}
    weights = [
        freerun.train(**settings, env_args=env_args, run_dir=run_dir / name, **mode).policy.weights
        for name, env_args, mode in (
            ("vector", {"env": "OneBit", "mode": "NEXT_STEP"}, own),
            ("reference", {"env": "OneBit", "mode": "SAME_STEP"}, {"mode": "sequential"}),
        )
    ]
    np.testing.assert_array_equal(*weights)


def test_without_autoreset_runs_are_deterministic(run_dir: Path) -> None:
    settings: dict[str, Any] = {"deterministic": True, "total_episodes": 24, "episodes_per_update": 8, "seed": 5}
    settings |= {"num_epochs": 1, "hidden_sizes": (8,), "quiet": True}
    env_args = {"env": "Audit", "mode": "DISABLED", "short": 3, "long": 11}
    mine = freerun.train(
        "toy_vectors:synced",
        env_args=env_args,
        num_workers=2,
        envs_per_worker=3,
        run_dir=run_dir / "vector",
        **settings,
    )
    reference = freerun.train(
        "toy_envs:Audit", env_args={"short": 3, "long": 11}, mode="sequential", run_dir=run_dir / "one", **settings
    )
    np.testing.assert_array_equal(mine.policy.weights, reference.policy.weights)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--envs-per-worker", "2"], "give --segment-steps 32, or have one environment per worker"),
        (
            ["--envs-per-worker", "2", "--deterministic"],
            "leave --deterministic out, or have one environment per worker",
        ),
    ],
)
def test_whole_episodes_are_refused_in_one_sentence(
    flags: list[str], remedy: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "vector:CartPole-v1", "--num-workers", "1", "-q", "--run-dir", str(run_dir), *flags]
    assert main(command) == 2
    assert f"so that nobody can ask it for whole ones: {remedy}" in capsys.readouterr().err
    assert not run_dir.exists()


def test_a_vector_environment_is_checked_alone_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "vector:CartPole-v1"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "4 environments made 1,00" in words
    assert "the step after the one that ends an episode is a reset, and no step; only the first episodes are" in words


def test_a_check_finds_missing_final_observations(capsys: pytest.CaptureFixture[str]) -> None:
    env_args = ["--env-args", "mode", "SAME_STEP", "with_final_obs", "False"]
    assert main(["check-env", "toy_vectors:Counting", *env_args]) == 1
    assert 'no "final_obs"' in " ".join(capsys.readouterr().out.split())
