"""Asynchronous runs re-enacted one step after another: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.cli import main
from freerun.core import UserError
from freerun.replaying import replay

SETTINGS: dict[str, Any] = {
    "total_episodes": 80,
    "episodes_per_update": 8,
    "num_epochs": 2,
    "hidden_sizes": (16,),
    "normalize_obs": True,
    "anneal_learning_rate": True,
    "quiet": True,
    "seed": 3,
    "checkpoint_every": "1",
    "num_workers": 3,
}


@pytest.mark.parametrize("mode", ["pipes", "executor", "freerun", "ray"])
@pytest.mark.parametrize("max_lag", [1, 3])
def test_a_run_with_lag_is_reenacted_bit_for_bit(mode: str, max_lag: int, run_dir: Path) -> None:
    result = freerun.train("CartPole-v1", mode=mode, max_lag=max_lag, run_dir=run_dir, **SETTINGS)
    assert result.summary["lag_max"] >= 1, "nothing that a run without lag would not have shown"
    again = replay(run_dir)
    np.testing.assert_array_equal(again.weights, result.policy.weights)
    assert again.is_same
    assert len(again.compared) >= 3
    assert again.num_updates == result.summary["updates"]
    assert again.num_steps == result.summary["env_steps"]


def test_segments_of_episodes_and_box_actions(run_dir: Path) -> None:
    """An episode that lies in several segments, each with other weights."""
    settings = {**SETTINGS, "episodes_per_update": None, "steps_per_update": 128, "total_episodes": None}
    settings |= {"total_steps": 1500, "segment_steps": 16, "max_lag": 2}
    result = freerun.train("Pendulum-v1", mode="freerun", run_dir=run_dir, **settings)
    assert result.summary["lag_max"] >= 1
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, result.policy.weights)


def test_sac_too_and_a_run_that_was_resumed(run_dir: Path) -> None:
    settings = {"algo": "sac", "hidden_sizes": (16,), "batch_size": 16, "learning_starts": 100, "steps_per_update": 50}
    more = {"mode": "pipes", "num_workers": 2, "quiet": True, "max_episode_steps": 50, "checkpoint_every": "1"}
    freerun.train("Pendulum-v1", total_steps=400, run_dir=run_dir, **settings, **more)
    result = freerun.resume(run_dir, total_steps=800)
    again = replay(run_dir)
    np.testing.assert_array_equal(again.weights, result.policy.weights)


def test_a_difference_is_found_and_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freerun.train("CartPole-v1", mode="pipes", max_lag=1, run_dir=run_dir, **{**SETTINGS, "keep_checkpoints": 20})
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert main(["replay", str(run_dir)]) == 0
    assert "the same weights as in the run, bit for bit" in capsys.readouterr().out
    lines[5]["segments"].reverse()
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(run_dir)]) == 1
    assert "after update 6 the weights are others" in capsys.readouterr().out


def test_it_stops_in_a_debugger_before_an_update(run_dir: Path) -> None:
    freerun.train("CartPole-v1", mode="freerun", max_lag=1, run_dir=run_dir, **SETTINGS)
    command = [sys.executable, "-m", "freerun", "replay", str(run_dir), "--until-update", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # Ray sets it
    words = "p version + 1\nstep\nstep\nwhere\ncontinue\n"
    done = subprocess.run(command, input=words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Stopped before update 4" in done.stdout
    assert "(Pdb) 4" in done.stdout
    assert "ppo.py" in done.stdout
    assert "bit for bit" in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "sync", "max_lag": 0}, "with one environment per worker, or with --deterministic"),
        ({"mode": "freerun", "envs_per_worker": 4}, "with one environment per worker, or with --deterministic"),
    ],
)
def test_what_cannot_be_reenacted_is_refused(settings: dict[str, Any], message: str, run_dir: Path) -> None:
    freerun.train("CartPole-v1", run_dir=run_dir, **{**SETTINGS, "total_episodes": 16, **settings})
    with pytest.raises(UserError, match=message):
        replay(run_dir)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"update": 2, "progress": 0, "segments": []}',
        '{"update": 1, "progress": 0, "segments": [[[[0, -5, 0]]]]}',
        '{"update": 1, "progress": 0, "segments": [[[[0, "a", 0]]]]}',
        '{"update": 1, "progress": 0, "segments": [[[["__import__", 1, 0]]]]}',
        "[" * 10_000,
    ],
)
def test_ledgers_that_freerun_did_not_write_are_refused(line: str, run_dir: Path) -> None:
    freerun.train("CartPole-v1", run_dir=run_dir, **{**SETTINGS, "mode": "sequential", "num_workers": 1})
    (run_dir / "ledger.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"line 1 of .* is not one that freerun wrote"):
        replay(run_dir)
