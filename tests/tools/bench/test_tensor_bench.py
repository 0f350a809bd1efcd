"""`freerun bench` of environments that are tensors: every mode that steps them, beside the simulator alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import bench_results
import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.core import ActionSpace, EnvSpec
from freerun.settings.registry import MODES
from freerun.tools.bench import analysis
from freerun.tools.bench.bare_simulator import RandomActor
from freerun.tools.bench.bench_cases import prepare, run_job
from freerun.tools.bench.bench_job import Job
from freerun.tools.bench.bench_options import BenchOptions
from freerun.tools.bench.results import Case, Results
from freerun.tools.cli.main import main

DRONE = "freerun/RoughDrone-v1"
FAKE = Path(__file__).parents[2] / "fake_isaac"
TENSOR_MODES = [name for name, mode in MODES.items() if mode.traits.tensors is not None]


def test_all_are_the_modes_that_step_tensors() -> None:
    cases = prepare(BenchOptions(DRONE, num_envs="64,16")).cases
    found = [(case.label, case.num_workers) for case in cases]
    assert sorted(found) == sorted((label, number) for number in (16, 64) for label in ("bare", *TENSOR_MODES))
    assert found[0] == ("bare", 16)
    problems = {case.label: case.problem for case in prepare(BenchOptions(DRONE, "sync,freerun", num_envs="16")).cases}
    assert problems["freerun"] == "it does not step environments that are tensors"
    assert problems["sync"] is None
    assert BenchOptions("Isaac-Cartpole-Direct-v0", device="cuda:1").numbers() == [4096]
    assert BenchOptions("Isaac-Cartpole-Direct-v0").numbers() == [64]


@pytest.mark.parametrize("mode", TENSOR_MODES)
def test_every_mode_does_the_same_work(mode: str) -> None:
    config = Job(DRONE, mode, 16, 1.0, steps_per_update=160, is_tensors=True).config()
    assert (config["num_envs"], config["steps_per_update"]) == (16, 160)
    assert config.get("num_steps_per_env", 10) == 10
    assert config.get("collection_batch_size", 160) == 160


def test_the_limit_is_the_simulator_alone() -> None:
    cases = [
        Case("bare", 16, 0, [bench_results.bare(990), bench_results.bare(1000), bench_results.bare(1010)]),
        bench_results.case("batch", 16, 790, 800, 810),
        bench_results.case("sync", 16, 490, 500, 510),
    ]
    options = BenchOptions(DRONE, num_envs="16")
    results = Results(options, bench_results.MACHINE, cases, "finished", 60.0, "2026-01-01 12:00")
    best, second = analysis.rows(results, 16)
    assert (best.label, best.of_cores, best.speed_up) == ("batch", None, None)
    assert best.of_bare == pytest.approx(0.8)
    assert second.of_bare == pytest.approx(0.5)
    words = "With 16 environments batch is the fastest: 800 steps/s, 80 % of the bare limit; 1.60 × the next, sync."
    assert analysis.verdict(results, 16) == words
    _, command = analysis.recommendation(results)
    assert command is not None
    assert command.startswith(f"freerun train {DRONE} --mode batch --steps-per-update 1000")
    assert "--num-envs 16" in command


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_a_bench_of_drones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bench"
    few = ["--num-envs", "8", "--seconds", "0.2", "--repeats", "1", "--steps-per-update", "80"]
    assert main(["bench", DRONE, *few, "--env-args", "task", "hover", "--output", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "freerun/RoughDrone-v1, 8 environments; bare limit" in told
    report = json.loads((folder / "report.json").read_text())
    assert {case["label"]: len(case["runs"]) for case in report["cases"]} == dict.fromkeys(("bare", *TENSOR_MODES), 1)
    assert all(run["steps_per_second"] > 0 for case in report["cases"] for run in case["runs"])
    assert "the simulator alone" in (folder / "report.md").read_text()
    assert "8 environments" in (folder / "report.html").read_text()
    assert main(["bench", "--resume", str(folder), "--num-envs", "4", "--modes", "sync"]) == 0
    assert "4 environments" in capsys.readouterr().out


@pytest.mark.slow
def test_a_task_of_isaac_lab_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ISAAC_VERSION", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    for mode in ("bare", "batch"):
        outcome = run_job(Job("Isaac-Counting-Direct-v0", mode, 4, 0.1, steps_per_update=32, is_tensors=True), 100)
        assert outcome.figures is not None, outcome
        assert outcome.figures["steps_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["CartPole-v1", "--num-envs", "8"], "CartPole-v1 is not stepped as tensors"),
        ([DRONE, "--num-envs", "8", "--workers", "2"], "--workers is for processes"),
        ([DRONE, "--num-envs", "0"], "--num-envs are numbers from 1 to 1,000,000"),
        ([DRONE, "--num-envs", "8", "--max-episode-steps", "5"], "have a time limit of their own"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(np.array([-2, -np.inf], np.float32), np.array([3, np.inf], np.float32)),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 5]),
    ],
)
def test_random_actions_are_allowed_ones(space: ActionSpace) -> None:
    spec = EnvSpec(spaces.Box(-1.0, 1.0, (1,), np.float32), space)
    action, log_prob = RandomActor(spec, torch.device("cpu")).act(torch.zeros(500, 1))
    assert log_prob.shape == (500,)
    rows = action.numpy()
    assert all(row in space for row in rows)
    if isinstance(space, spaces.Box):
        assert rows.min(axis=0) == pytest.approx([-2, -1], abs=0.1)
        assert rows.max(axis=0) == pytest.approx([3, 1], abs=0.1)
    else:
        assert len(np.unique(rows, axis=0)) == (3 if isinstance(space, spaces.Discrete) else 10)
