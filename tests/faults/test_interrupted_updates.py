"""Ctrl-C in the middle of an update that would never end: it is given up, and what was complete before it stays."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from leftovers import OutsideRun

import freerun
from freerun.persistence import checkpoint
from freerun.tools.cli.main import main

PPO = ["CartPole-v1", "--algo", "endless_updates:EndlessPPO", "--episodes-per-update", "6", "--total-episodes", "30"]
SAC = ["Pendulum-v1", "--algo", "endless_updates:EndlessSAC", "--learning-starts", "200", "--steps-per-update", "200"]
SAC += ["--total-steps", "4000", "--updates-per-step", "0.05", "--batch-size", "32"]
MBPO = ["Pendulum-v1", "--algo", "endless_updates:EndlessMBPO", "--learning-starts", "200", "--steps-per-update", "200"]
MBPO += ["--total-steps", "4000", "--updates-per-step", "0.05", "--batch-size", "32", "--model-hidden-sizes", "16"]
MBPO += ["--rollouts-per-step", "1", "--model-updates-per-step", "0.1"]
DRONE = ["freerun/RoughDrone-v0", "--algo", "endless_updates:EndlessPPO", "--mode", "batch", "--num-envs", "8"]
DRONE += ["--num-steps-per-env", "5", "--num-epochs", "1"]
SMALL = ["--hidden-sizes", "16", "--seed", "3", "-q"]


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The updates from version 2 on never end while this file is there."""
    path = tmp_path / "endless"
    path.write_text("2")
    monkeypatch.setenv("ENDLESS_UPDATE", str(path))
    return path


def start_and_wait_for_it(words: Sequence[str], run_dir: Path, endless: Path) -> OutsideRun:
    run = OutsideRun([*words, *SMALL], run_dir, ["-m", "brisk_freerun", "train"])
    deadline = time.monotonic() + 90
    while not Path(f"{endless}-begun").exists():
        assert time.monotonic() < deadline, run.text
        assert run.process.poll() is None, run.text
        time.sleep(0.05)
    run.family()
    return run


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("words", "mode", "every"),
    [
        (PPO, "sequential", "1"),
        (PPO, "freerun", "1"),
        (PPO, "freerun", "never"),
        (SAC, "sequential", "1"),
        (MBPO, "sequential", "1"),
    ],
    ids=["ppo", "ppo freerun", "ppo freerun, no earlier checkpoint", "sac", "mbpo"],
)
def test_nothing_of_the_update_is_kept_and_a_resumed_run_ends_where_it_would_have(
    words: list[str], mode: str, every: str, endless: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [*words, "--mode", mode, "--deterministic", "--checkpoint-every", every]
    with start_and_wait_for_it(words, run_dir, endless) as run:
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130, run.text
        assert not run.left_after(5.0)
        text = run.text
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["updates"]) == ("interrupted", 2)
    kept = 2 if every == "1" else 0
    assert f"in the middle of update 3, which is given up: --resume goes on after update {kept}" in text
    newest = checkpoint.newest(run_dir)
    assert newest.state["update"] == kept
    assert (run_dir / "policy.safetensors").read_bytes() == (newest.path / "policy.safetensors").read_bytes()

    endless.unlink()
    resumed = freerun.resume(run_dir)
    assert main(["train", *words, *SMALL, "--run-dir", str(tmp_path / "undisturbed")]) == 0
    undisturbed = freerun.load_policy(tmp_path / "undisturbed")
    np.testing.assert_array_equal(resumed.policy.weights, undisturbed.weights)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words",
    [[*DRONE, "--total-steps", "100000"], [*MBPO, "--mode", "freerun", "--num-workers", "1"]],
    ids=["in another thread", "beside the learner"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_update_or_a_training_in_another_thread_is_given_up_too(
    words: list[str], number: signal.Signals, endless: Path, run_dir: Path
) -> None:
    with start_and_wait_for_it(words, run_dir, endless) as run:
        run.process.send_signal(number)
        assert run.process.wait(60) == 130, run.text
        assert not run.left_after(5.0)
        assert "which is given up" in run.text
        assert "Traceback" not in run.text
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert checkpoint.newest(run_dir).state["update"] <= summary["updates"]


def test_a_second_one_ends_at_once(endless: Path, run_dir: Path) -> None:
    with start_and_wait_for_it([*PPO, "--mode", "sequential"], run_dir, endless) as run:
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.process.wait(60) == 130, run.text
        assert not run.left_after(5.0)
    assert checkpoint.newest(run_dir).state["update"] <= 2
