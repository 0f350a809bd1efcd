"""Sweeps with real trainings: over warm workers, in several processes, killed and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import pytest
from safetensors.numpy import load_file
from worker_processes import left_of, workers

import freerun
from freerun import experiment, training
from freerun.core import UserError
from freerun.run.replay_run import replay
from freerun.settings.registry import make_config
from freerun.tools.cli.main import main
from freerun.tools.sweep import sweep_report
from freerun.tools.sweep.sweep_study import TrialRow
from freerun.tools.sweep.trial_training import LocalTrainer, TrainingOrder

pytest.importorskip("optuna")
SHORT: dict[str, Any] = {
    "total_steps": 600,
    "steps_per_update": 200,
    "num_epochs": 1,
    "hidden_sizes": (8,),
    "num_workers": 2,
    "quiet": True,
}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def weights(run_dir: Path) -> dict[str, Any]:
    return load_file(run_dir / "policy.safetensors")


def test_each_trial_is_trained_as_if_it_were_alone(tmp_path: Path) -> None:
    vary = {"learning_rate": [1e-3, 3e-3], "hidden_sizes": [(8,), (4, 4)]}
    result = freerun.sweep(
        "CartPole-v1", vary=vary, sampler="grid", deterministic=True, run_dir=tmp_path / "sweep", **SHORT
    )
    assert [row.state for row in result.trials] == ["complete"] * 4
    for row in result.trials:
        alone = tmp_path / f"alone-{row.number}"
        config = result.folder / row.runs[0] / "config.json"
        assert main(["train", "--config", str(config), "--num-workers", "1", "--run-dir", str(alone)]) == 0
        for name, array in weights(alone).items():
            np.testing.assert_array_equal(array, weights(result.folder / row.runs[0])[name])
        assert read(alone / "summary.json")["mean_return"] == row.score
    assert replay(result.folder / "trial-003").is_same


def test_trials_share_workers_unless_the_policy_has_another_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []

    def noted(*arguments: Any) -> None:
        seen.append(workers())
        training.train(*arguments)

    monkeypatch.setattr(experiment, "train", noted)
    vary = {"hidden_sizes": [(8,), (4,)], "learning_rate": [1e-3, 1e-2]}
    freerun.sweep("CartPole-v1", vary=vary, sampler="grid", run_dir=tmp_path, **SHORT)
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert not left_of(seen[3]), "a worker of the sweep is left"


def test_best_json_is_what_freerun_train_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "CartPole-v1 --vary learning-rate 1e-4:1e-2:log --trials 2 --total-steps 400 --num-workers 1 --seed 5"
    words = [*line.split(), "--steps-per-update", "200", "--seeds-per-trial", "2", "--run-dir", str(tmp_path / "sweep")]
    assert main(["sweep", *words]) == 0
    printed = capsys.readouterr()
    assert "[2/2] trial 1: learning-rate" in printed.err
    rows = read(tmp_path / "sweep" / "trials.json")["trials"]
    for row in rows:
        runs = [tmp_path / "sweep" / name for name in row["runs"]]
        assert [read(run / "config.json")["seed"] for run in runs] == [5, 6]
        assert row["score"] == pytest.approx(sum(read(run / "summary.json")["mean_return"] for run in runs) / 2)
    best = max(rows, key=lambda row: row["score"])
    assert f"Best: trial {best['number']}" in printed.out
    settings = read(tmp_path / "sweep" / "best.json")
    assert settings["learning_rate"] == best["parameters"]["learning_rate"]
    assert main(["train", "--config", str(tmp_path / "sweep" / "best.json"), "--run-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 1000
    assert (tmp_path / "sweep" / "table.md").read_text().count("\n") == 4
    assert main(["sweep", *words]) == 2
    assert "already holds a sweep" in capsys.readouterr().err


def test_a_pruned_training_leaves_its_workers_to_the_next(tmp_path: Path) -> None:
    trainer = LocalTrainer()
    settings = {**SHORT, "env": "CartPole-v1", "deterministic": True, "total_steps": 2000}
    configs = [make_config({**settings, "run_dir": tmp_path / name}) for name in ("pruned", "next", "alone")]
    seen: list[int] = []

    def prune_at_three(rung: int, value: float) -> bool:
        seen.append(rung)
        return rung >= 3

    pruned = trainer.train(TrainingOrder(configs[0], 0), prune_at_three)
    assert (pruned.outcome, pruned.is_pruned, seen) == ("pruned", True, [1, 2, 3])
    assert pruned.reason == "worse than other trials after 30 % of the training"
    evaluated = TrainingOrder(configs[1], 1, score_episodes=3, score_seed=7)
    after = trainer.train(evaluated, lambda rung, value: False)
    trainer.close()
    experiment.run(configs[2])
    for name, array in weights(tmp_path / "alone").items():
        np.testing.assert_array_equal(array, weights(tmp_path / "next")[name])
    assert after.score == freerun.evaluate(tmp_path / "alone", episodes=3, seed=7).mean


@pytest.mark.usefixtures("quick_servers")
def test_several_at_once_with_a_front(tmp_path: Path) -> None:
    result = freerun.sweep(
        "CartPole-v1",
        vary={"learning_rate": "1e-4:1e-2:log"},
        trials=4,
        at_once=2,
        cost="seconds",
        run_dir=tmp_path,
        **{**SHORT, "num_workers": 1},
    )
    assert [row.state for row in result.trials] == ["complete"] * 4
    assert result.best in result.front
    assert [row.seconds for row in result.front] == sorted(row.seconds or 0.0 for row in result.front)


def test_of_two_equal_scores_the_one_on_the_front_is_the_best() -> None:
    slow, fast = (TrialRow(number, "complete", {}, 20.3, seconds, [], None) for number, seconds in ((0, 2.0), (1, 1.0)))
    fast = dataclasses.replace(fast, on_front=True)
    assert sweep_report.best_of([slow, fast]) == fast
    assert sweep_report.ranked([slow, fast]) == [fast, slow]


def test_modes_and_algorithms_whose_workers_cannot_be_shared(tmp_path: Path) -> None:
    settings = {"mode": "batch", "num_envs": 2, "num_steps_per_env": 50, "total_steps": 400, "quiet": True}
    result = freerun.sweep(
        "CartPole-v1", vary={"num_steps_per_env": [50, 100]}, sampler="grid", run_dir=tmp_path, **settings
    )
    assert [row.state for row in result.trials] == ["complete"] * 2


def test_a_trial_that_fails_does_not_end_the_sweep_but_three_do(tmp_path: Path) -> None:
    settings = {**SHORT, "num_workers": 1}
    result = freerun.sweep(
        "toy_envs:Audit", vary={"device": ["cpu", "nowhere"]}, sampler="grid", run_dir=tmp_path / "some", **settings
    )
    assert [row.state for row in result.trials] == ["complete", "failed"]
    assert "nowhere" in str(result.trials[1].reason)
    with pytest.raises(UserError, match="nowhere"):
        freerun.sweep(
            "toy_envs:Audit", vary={"gamma": "0.5:0.9"}, device="nowhere", run_dir=tmp_path / "all", **settings
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_servers")
@pytest.mark.parametrize("at_once", [1, 2])
def test_killed_and_resumed_it_loses_no_finished_trial(at_once: int, tmp_path: Path) -> None:
    line = "CartPole-v1 --vary learning-rate 1e-4:1e-2:log --trials 6 --total-steps 1500 --num-workers 1 --no-prune"
    words = [*line.split(), "--steps-per-update", "500", "--at-once", str(at_once), "--run-dir", str(tmp_path)]
    process = preloaded_python.Process(["-m", "freerun", "sweep", *words], stderr=subprocess.DEVNULL)
    before = wait_for_trials(tmp_path, 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # A trial may have finished between the look and the kill, so there may be more than were seen.
    done = freerun.resume_sweep(tmp_path, trials=7)
    assert [row.state for row in done.trials] == ["complete"] * 7
    kept = {row.number: (row.score, row.parameters) for row in done.trials}
    for row in before:
        assert kept[row["number"]] == (row["score"], row["parameters"])
    assert len({row.parameters["learning_rate"] for row in done.trials}) == 7


def wait_for_trials(folder: Path, num: int, process: preloaded_python.Process) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the sweep has ended by itself"
        trials = read(folder / "trials.json")["trials"] if (folder / "trials.json").exists() else []
        complete = [trial for trial in trials if trial["state"] == "complete"]
        if len(complete) >= num:
            return complete
        time.sleep(0.02)
    raise AssertionError("no trials within two minutes")


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_interrupted_it_says_how_to_go_on(at_once: int, tmp_path: Path) -> None:
    words = ["CartPole-v1", "--vary", "gamma", "0.9:0.99", "--total-steps", "1500", "--num-workers", "1"]
    words += ["--at-once", str(at_once), "--run-dir", str(tmp_path), "--no-prune"]
    command = ["-m", "freerun", "sweep", *words]
    process = preloaded_python.Process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_for_trials(tmp_path, 1, process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait() == 130
    assert f"Train the rest: freerun sweep --resume {tmp_path}" in output


def test_a_sweep_from_elsewhere_needs_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = freerun.sweep("toy_envs:Audit", vary={"gamma": "0.5:0.9"}, trials=1, run_dir=tmp_path, **SHORT)
    (result.folder / ".origin").unlink()
    assert main(["sweep", "--resume", str(tmp_path), "--trials", "2"]) == 2
    assert "--trust toy_envs:Audit" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(tmp_path), "--trials", "2", "--trust", "toy_envs:Audit"]) == 0


def test_the_settings_of_python_have_the_names_of_the_flags() -> None:
    with pytest.raises(UserError, match="sampler = 'luck' is of the wrong kind"):
        freerun.sweep("CartPole-v1", vary={"gamma": "0.5:0.9"}, sampler="luck")
