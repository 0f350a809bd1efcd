"""Runs on environments that are tensors, replayed: the same weights, bit for bit, in every mode that steps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freerun
from freerun.adapters import catalog
from freerun.core import UserError
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.tools.cli.main import main

DRONE = "freerun/RoughDrone-v1"
MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
SMALL: dict[str, Any] = {"hidden_sizes": (16,), "quiet": True, "num_envs": 8, "checkpoint_every": "100", "seed": 3}
OFF_POLICY = {"updates_per_step": 0.1, "learning_starts": 60, "batch_size": 16}
MODEL = {"model_hidden_sizes": (16,), "rollouts_per_step": 1.0, "model_updates_per_step": 0.1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"num_epochs": 2, "normalize_obs": True},
    "sac": OFF_POLICY,
    "fastsac": OFF_POLICY,
    "mbpo": {**OFF_POLICY, **MODEL, "steps_per_model_training": 80},
}


def settings_for(mode: str, algo: str) -> dict[str, Any]:
    size = {"collection_batch_size": 40, "max_queue_size": 2} if mode == "continuous" else {"num_steps_per_env": 5}
    return {**SMALL, **size, **ALGORITHMS[algo], "mode": mode, "algo": algo, "env_args": {"episode_seconds": 0.3}}


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_drones_is_replayed_bit_for_bit(mode: str, algo: str, run_dir: Path) -> None:
    result = freerun.train(DRONE, **settings_for(mode, algo), total_steps=600, run_dir=run_dir)
    again = replay(run_dir)
    assert again.is_same
    assert len(again.compared) >= 3
    assert again.num_steps == result.summary["env_steps"]
    np.testing.assert_array_equal(again.weights, result.policy.weights)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_had_new_simulators(mode: str, run_dir: Path) -> None:
    freerun.train(DRONE, **settings_for(mode, "ppo"), total_steps=400, run_dir=run_dir)
    result = freerun.resume(run_dir, total_steps=800)
    again = replay(run_dir)
    np.testing.assert_array_equal(again.weights, result.policy.weights)


def test_several_simulators_and_priorities(run_dir: Path) -> None:
    """Segments are dropped and taken out of order, and the simulators have played all of them."""
    options = {**settings_for("continuous", "sac"), "num_collectors": 2, "queue_priority": "td-error"}
    result = freerun.train(DRONE, **options, total_steps=1600, run_dir=run_dir)
    np.testing.assert_array_equal(replay(run_dir).weights, result.policy.weights)


def test_what_was_rejected_is_played_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy/Counting-v0", "toy_tensors:build")
    options = {**settings_for("batch", "ppo"), "env_args": {"how": "nan once", "fail_after": 33}}
    result = freerun.train("toy/Counting-v0", **options, total_steps=800, run_dir=run_dir)
    assert result.summary["segments_rejected"] == 1
    np.testing.assert_array_equal(replay(run_dir).weights, result.policy.weights)


def test_a_difference_is_found(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freerun.train(DRONE, **settings_for("batch", "ppo"), total_steps=800, run_dir=run_dir)
    assert main(["replay", str(run_dir)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    played = lines[-1]["tensors"][0][3]
    lines[-1]["tensors"][0][3] = [version - 1 for version in played]
    _write(run_dir, lines)
    assert main(["replay", str(run_dir)]) == 1
    assert "the weights differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ([0, 0, 40, [7]], "it names version 7 before that version exists"),
        ([0, 5, 40, []], "segment 5 of simulator 0 was never played"),
        ([1, 0, 40, [0]], "resumed with fewer collectors"),
        ([0, 0, 80, [0]], "had 80 steps in this run and has 40 now"),
        ([0, 0, 40, ["0"]], "line 1 of .* is not one that freerun wrote"),
        ([0, 0], "line 1 of .* is not one that freerun wrote"),
    ],
)
def test_a_damaged_ledger_is_refused(entry: list[Any], sentence: str, run_dir: Path) -> None:
    freerun.train(DRONE, **settings_for("sync", "ppo"), total_steps=120, run_dir=run_dir)
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    lines[0]["tensors"] = [entry]
    _write(run_dir, lines)
    with pytest.raises(UserError, match=sentence):
        replay(run_dir)


def test_a_run_of_an_earlier_freerun_is_refused(run_dir: Path) -> None:
    freerun.train(DRONE, **settings_for("sync", "ppo"), total_steps=120, run_dir=run_dir)
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tensors"]
    _write(run_dir, lines)
    with pytest.raises(UserError, match="did not number the segments"):
        replay(run_dir)


def _write(run_dir: Path, lines: list[dict[str, Any]], name: str = "ledger.jsonl") -> None:
    (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("mode", ["freerun", "pipes"])
def test_concurrent_stages_are_replayed(mode: str, run_dir: Path) -> None:
    """The metrics say in which update a training of the model had ended."""
    options = {**ALGORITHMS["mbpo"], "algo": "mbpo", "mode": mode, "stages": "concurrent", "num_workers": 2}
    options |= {"hidden_sizes": (16,), "quiet": True, "max_episode_steps": 50, "checkpoint_every": "300"}
    result = freerun.train("Pendulum-v1", **options, steps_per_update=20, total_steps=900, run_dir=run_dir)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["concurrent_stages"] == 1.0
    assert records[-1]["model_version"] > 3
    again = replay(run_dir)
    assert len(again.compared) >= 3
    np.testing.assert_array_equal(again.weights, result.policy.weights)
    number = next(
        n for n, one in enumerate(records) if n and one["model_version"] == records[n - 1]["model_version"] + 1
    )
    records[number]["model_version"] -= 1
    _write(run_dir, records, "metrics.jsonl")
    assert not replay(run_dir).is_same, "a model that was used an update later makes other weights"
    _write(run_dir, [{**record, "model_version": None} for record in records], "metrics.jsonl")
    with pytest.raises(UserError, match="do not say which version of the model"):
        replay(run_dir)
    _write(run_dir, [], "metrics.jsonl")
    with pytest.raises(UserError, match="has 0 updates and the ledger"):
        replay(run_dir)
