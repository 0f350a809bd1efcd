"""Asynchronous runs replayed one step after another: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import pytest

import freerun
from freerun.core import Tunable, UserError
from freerun.run.replay_run import replay
from freerun.tools.cli.main import main
from freerun.tuning import live_tuner
from freerun.tuning.observation import Observation
from freerun.tuning.rules import Circumstances
from freerun.tuning.tuner import Change, Effect

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


def test_a_difference_is_found_and_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freerun.train("CartPole-v1", mode="pipes", max_lag=1, run_dir=run_dir, **{**SETTINGS, "keep_checkpoints": 20})
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert main(["replay", str(run_dir)]) == 0
    assert "the same weights as in the run, bit for bit" in capsys.readouterr().out
    lines[5]["segments"].reverse()
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(run_dir)]) == 1
    assert "after update 6 the weights differ" in capsys.readouterr().out


def test_it_stops_in_a_debugger_before_an_update(run_dir: Path) -> None:
    freerun.train("CartPole-v1", mode="freerun", max_lag=1, run_dir=run_dir, **SETTINGS)
    command = ["-m", "freerun", "replay", str(run_dir), "--until-update", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # Ray sets it
    words = "p version + 1\nstep\nstep\nwhere\ncontinue\n"
    done = preloaded_python.run(*command, input=words, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Stopped before update 4" in done.stdout
    assert "(Pdb) 4" in done.stdout
    assert "ppo.py" in done.stdout
    assert "bit for bit" in done.stdout


@pytest.mark.parametrize("words", ["q\n", ""])
def test_quitting_the_debugger_ends_quietly(words: str, run_dir: Path) -> None:
    freerun.train("CartPole-v1", mode="sequential", run_dir=run_dir, **{**SETTINGS, "num_workers": 1})
    command = ["-m", "freerun", "replay", str(run_dir), "--until-update", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    done = preloaded_python.run(*command, input=words, env=environment)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "The debugger was quit" in done.stdout


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


class MovesOnce:
    """It stands in for the tuner of --adapt: it moves one tunable to its upper bound, once, whatever it sees."""

    name = ""
    trial = None

    def __init__(self, tunables: Sequence[Tunable], circumstances: Circumstances):
        self._tunables = [tunable for tunable in tunables if tunable.name == self.name]

    def observe(self, seen: Observation) -> list[Change]:
        if not self._tunables:
            return []
        tunable = self._tunables.pop()
        effect = Effect(1.0, 1.0, 0.0, 0.0)
        return [Change("try", tunable.name, tunable.read(), tunable.high, "a test wants it", effect)]


@pytest.mark.parametrize(
    ("tunable", "bound", "message"),
    [
        ("minibatch", {"adapt_max_minibatch": 64}, "--adapt has changed the minibatch of this run"),
        ("update_ratio", {"adapt_min_update_ratio": 1.0}, "--adapt has changed the update_ratio of this run"),
        ("envs_per_worker", {"adapt_max_envs_per_worker": 4}, "acted on several observations at once"),
        ("num_workers", {"adapt_max_workers": 3}, None),
    ],
)
def test_a_run_is_refused_only_if_adapt_moved_what_decides_its_numbers(
    tunable: str, bound: dict[str, Any], message: str | None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MovesOnce, "name", tunable)
    monkeypatch.setattr(live_tuner, "Tuner", MovesOnce)
    for name in ("LOOK_SECONDS", "SETTLE_SECONDS", "UNITS_TO_SETTLE"):
        monkeypatch.setattr(live_tuner, name, 0.02)
    settings = {**SETTINGS, "total_episodes": 400, "minibatch_size": 32, "num_workers": 2, "adapt": True, **bound}
    freerun.train("CartPole-v1", run_dir=run_dir, adapt_window=0.05, **settings)
    assert f'"knob": "{tunable}"' in (run_dir / "adapting.jsonl").read_text(), "the tunable has not moved"
    if message is None:
        assert replay(run_dir).is_same
        return
    with pytest.raises(UserError, match=message):
        replay(run_dir)


def test_several_learners_are_refused_with_the_reason(run_dir: Path) -> None:
    freerun.train(
        "CartPole-v1", run_dir=run_dir, **{**SETTINGS, "total_episodes": 16, "mode": "sequential", "num_workers": 1}
    )
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**config, "num_learners": 2}))
    with pytest.raises(UserError, match="several learners cannot be replayed bit for bit"):
        replay(run_dir)


def test_a_damaged_record_of_adapt_is_refused(run_dir: Path) -> None:
    freerun.train(
        "CartPole-v1", run_dir=run_dir, **{**SETTINGS, "total_episodes": 16, "mode": "sequential", "num_workers": 1}
    )
    (run_dir / "adapting.jsonl").write_text('{"knob": "minibatch"}\n')
    with pytest.raises(UserError, match=r"line 1 of .*adapting\.jsonl is not one that freerun wrote"):
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
