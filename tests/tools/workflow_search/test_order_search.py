"""`freerun search-workflows`: warm workers, a folder that survives a kill, a report, and sentences for bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import pytest
from safetensors.numpy import load_file

import freerun
from freerun import experiment, training
from freerun.core import LearnerFailure, UserError
from freerun.persistence.run_folder import RunFolder
from freerun.settings.registry import make_config
from freerun.tools.cli.main import main
from freerun.tools.workflow_search.order_processes import trainer_processes
from freerun.tools.workflow_search.order_search import DEFAULTS, FROM_NOTHING, SearchOptions, search, with_orders
from freerun.tools.workflow_search.order_trainer import TrainingJob
from freerun.tools.workflow_search.precedence import ORDERS

SETTINGS: dict[str, Any] = {
    "episode_steps": 10,
    "total_episodes": 12,
    "episodes_per_update": 6,
    "num_epochs": 2,
    "hidden_sizes": (8,),
    "seed": 2,
}
SEARCH: dict[str, Any] = {**SETTINGS, "num_workers": 1, "envs_per_worker": 2, "trial_episodes": 3}
WORDS = [
    *("--episode-steps", "10", "--total-episodes", "12", "--episodes-per-update", "6", "--num-epochs", "2"),
    *("--num-workers", "1", "--envs-per-worker", "2", "--trial-episodes", "3"),
]


def trainings(folder: Path) -> list[dict[str, Any]]:
    path = folder / "trainings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_training_is_as_if_it_were_alone(tmp_path: Path) -> None:
    result = freerun.search_workflows(
        run_dir=tmp_path / "search", budget_trials=2, seeds_per_trial=2, deterministic=True, **SEARCH
    )
    found = trainings(tmp_path / "search")
    assert [line["seed"] for line in found] == [2, 3, 2, 3]
    assert result.best in {line["order"] for line in found}
    for line in found:
        settings = {**SETTINGS, "seed": line["seed"], "workflow": (line["order"],), "mode": "sequential"}
        preset = {
            "compliance_weight": 20.0,
            "learning_rate": 2e-3,
            "minibatch_size": 500,
            "normalize_reward": True,
            "anneal_learning_rate": True,
        }
        alone = experiment.run(
            make_config(
                {
                    **preset,
                    **settings,
                    "env": "freerun/NetworkDefence-v0",
                    "deterministic": True,
                    "quiet": True,
                    "run_dir": tmp_path / f"{line['trial']}-{line['seed']}",
                }
            )
        )
        trained = load_file(tmp_path / "search" / line["run"] / "policy.safetensors")
        for name, array in load_file(alone.run_dir / "policy.safetensors").items():
            np.testing.assert_array_equal(array, trained[name])
    assert found[2]["startup_seconds"] < found[0]["startup_seconds"], "the workers of the seed were warm"


def test_the_report_ranks_all_orders(tmp_path: Path) -> None:
    result = freerun.search_workflows(run_dir=tmp_path, budget_trials=3, sampler="random", warm_start=True, **SEARCH)
    found = trainings(tmp_path)
    assert [line["trial"] for line in found] == [0, 1, 2, -1]
    assert found[0]["started_from"] is found[3]["started_from"] is None
    assert found[1]["started_from"] == found[0]["run"]
    assert result.ranking.warm_start is not None
    assert result.ranking.warm_start.cold_score == found[3]["trial_return"]
    ranking = json.loads((tmp_path / "ranking.json").read_text())
    assert {entry["order"] for entry in ranking["orders"]} == set(ORDERS)
    expected = [entry["expected_score"] for entry in ranking["orders"]]
    assert expected == sorted(expected, reverse=True)
    assert all(entry["deviation"] >= 0 for entry in ranking["orders"])
    tried = {entry["order"]: entry for entry in ranking["orders"] if entry["num_trainings"]}
    assert {name: entry["score"] for name, entry in tried.items()} == {
        line["order"]: line["trial_return"] for line in found[:3]
    }
    assert all(0 <= entry["compliance"] <= 1 for entry in tried.values())
    assert len(ranking["precedences"]) == 10
    assert (tmp_path / "posterior.png").stat().st_size > 10_000
    assert "| rank | order |" in (tmp_path / "ranking.md").read_text()


def test_a_killed_search_goes_on_without_repeating_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "search"
    process = preloaded_python.Process(
        ["-m", "freerun", "search-workflows", *WORDS, "--budget-trials", "40", "--run-dir", str(folder)]
    )
    deadline = time.monotonic() + 100
    while len(trainings(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = trainings(folder)
    assert 2 <= len(before) < 40
    written = {line["run"]: os.stat(folder / line["run"] / "summary.json").st_mtime_ns for line in before}
    budget = len(before) + 2
    assert main(["search-workflows", "--resume", str(folder), "--budget-trials", str(budget)]) == 0
    assert "Best order" in capsys.readouterr().out
    after = trainings(folder)
    assert after[: len(before)] == before
    assert len(after) == budget
    assert len({(line["order"], line["seed"]) for line in after}) == budget
    assert written == {run: os.stat(folder / run / "summary.json").st_mtime_ns for run in written}
    # Nothing is left to do now, and the same command says so by doing nothing.
    assert main(["search-workflows", *WORDS, "--budget-trials", str(budget), "--run-dir", str(folder)]) == 0
    assert trainings(folder) == after
    assert main(["search-workflows", "--resume", str(folder)]) == 0
    assert trainings(folder) == after, "without --budget-trials, its own counts"
    assert main(["search-workflows", *WORDS, "--learning-rate", "0.5", "--run-dir", str(folder)]) == 2
    assert "other settings" in capsys.readouterr().err


def test_an_interrupted_training_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SEARCH, "deterministic": True, "total_episodes": 18, "budget_trials": 3}
    freerun.search_workflows(run_dir=tmp_path / "whole", **settings)
    calls: list[int] = []

    class Interrupts:
        def write(self, step: int, metrics: Any) -> None:
            if len(calls) == 2 and metrics["update"] == 2:
                raise KeyboardInterrupt

        def close(self) -> None: ...

    def interrupted(algorithm: Any, collector: Any, budget: Any, ledger: Any, sinks: Any, *rest: Any) -> None:
        calls.append(1)
        training.train(algorithm, collector, budget, ledger, [*sinks, Interrupts()], *rest)

    monkeypatch.setattr(experiment, "train", interrupted)
    stopped = freerun.search_workflows(run_dir=tmp_path / "stopped", **settings)
    assert stopped.outcome == "interrupted"
    assert len(trainings(tmp_path / "stopped")) == 1
    monkeypatch.undo()
    assert freerun.search_workflows(run_dir=tmp_path / "stopped", **settings).outcome == "finished"
    names = ("trial", "order", "seed", "run", "trial_return", "compliance")
    whole, resumed = (
        [{name: line[name] for name in names} for line in trainings(tmp_path / folder)]
        for folder in ("whole", "stopped")
    )
    assert whole == resumed


def test_seeds_of_a_trial_that_a_kill_has_lost_are_used_before_new_ones(tmp_path: Path) -> None:
    """Of two trials of one order that ran at once, only the second one was finished when the search was killed."""
    settings = {**SEARCH, "sampler": "halving", "run_dir": tmp_path}
    freerun.search_workflows(budget_trials=2, **settings)
    best, other = sorted(trainings(tmp_path), key=lambda line: -line["trial_return"])
    lines = [{**best, "seed": SETTINGS["seed"] + 1}, other]
    (tmp_path / "trainings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    freerun.search_workflows(budget_trials=3, **settings)
    assert sorted(line["seed"] for line in trainings(tmp_path) if line["order"] == best["order"]) == [2, 3]


def test_two_searches_cannot_share_a_folder(tmp_path: Path) -> None:
    freerun.search_workflows(run_dir=tmp_path, budget_trials=1, **SEARCH)
    release = RunFolder(tmp_path).claim()
    with pytest.raises(UserError, match="still going on"):
        freerun.search_workflows(run_dir=tmp_path, budget_trials=2, **SEARCH)
    release()
    with pytest.raises(UserError, match="cannot write to"):
        freerun.search_workflows(run_dir=tmp_path / "trainings.jsonl", budget_trials=2, **SEARCH)


def test_ctrl_c_between_two_trainings_keeps_what_is_finished(tmp_path: Path) -> None:
    def interrupt(sentence: str) -> None:
        raise KeyboardInterrupt

    config = make_config(with_orders({**DEFAULTS, **SETTINGS, "num_workers": 1, "run_dir": tmp_path}))
    options = SearchOptions(budget_trials=2, warm_start=True, trial_episodes=3)
    stopped = search(config, options, interrupt)
    assert stopped is not None
    assert stopped.outcome == "interrupted"
    assert stopped.best == trainings(tmp_path)[0]["order"]
    # Of the last call, only the training that shows the effect of --warm-start was left.
    assert [search(config, options, interrupt) for _ in range(2)][1] is not None
    assert [line["trial"] for line in trainings(tmp_path)] == [0, 1, FROM_NOTHING]
    finished = search(config, options, interrupt)
    assert finished is not None
    assert finished.outcome == "finished"


def test_a_process_that_dies_ends_the_search_with_a_sentence() -> None:
    config = make_config(with_orders({**DEFAULTS, **SETTINGS, "num_workers": 1}))
    others = set(multiprocessing.active_children())
    with trainer_processes(config, 3, 1) as trainers:
        (process,) = set(multiprocessing.active_children()) - others
        process.kill()
        process.join()
        trainers.start(TrainingJob(0, 0, 0, Path("nowhere")))
        with pytest.raises(LearnerFailure, match="the same command continues"):
            trainers.wait()


@pytest.mark.parametrize("content", ["{}", '{"settings": {}, "search": {"sampler": "tea"}, "budget_trials": 3}', "["])
def test_a_folder_of_something_else_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "search.json").write_text(content)
    assert main(["search-workflows", "--resume", str(tmp_path)]) == 2
    assert "search.json" in capsys.readouterr().err


@pytest.mark.slow
def test_several_trainings_at_once(tmp_path: Path) -> None:
    freerun.search_workflows(run_dir=tmp_path, budget_trials=3, at_once=2, **SEARCH)
    assert sorted(line["trial"] for line in trainings(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget-trials", "0"], "--budget-trials must be at least 1"),
        (["--at-once", "0"], "--at-once must be at least 1"),
        (["CartPole-v1"], "has no workflows to search"),
        (["--workflow", ORDERS[0]], "leave --workflow and --workflows out"),
        (["--workflows", "orders.txt"], "leave --workflow and --workflows out"),
        (["--init-from", "runs/other"], "--init-from is for a single training"),
        (["--resume", "nowhere"], "there is no such file"),
        (["--resume", "nowhere", "--seed", "1"], "leave --seed out"),
        (["--mode", "auto"], "a search needs a mode"),
        (["--num-learners", "2"], "one learner each"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search-workflows", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
