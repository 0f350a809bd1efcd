"""--eval-every on a simulator that a process can have only once: between two segments, in every mode with tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_tensors import Counting

import freerun
from freerun.adapters import catalog
from freerun.core import EnvFailure, UserError
from freerun.settings import registry

MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
ENV = "toy:Counting"
"""A name of a family: such environments are never stepped alone."""


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.TENSOR_ENVS, "toy:", "toy_tensors:build")


def settings_for(mode: str) -> dict[str, Any]:
    size = {"collection_batch_size": 30, "max_queue_size": 3} if mode == "continuous" else {"num_steps_per_env": 5}
    return {**size, "mode": mode, "num_envs": 6, "hidden_sizes": (8,), "quiet": True}


def records_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_each_of_the_first_environments_plays_one_episode(mode: str, run_dir: Path) -> None:
    options = {**settings_for(mode), "eval_every": 120, "eval_episodes": 4}
    summary = freerun.train(ENV, **options, total_steps=600, run_dir=run_dir).summary
    found = [record for record in records_of(run_dir) if "eval_return" in record]
    # Lengths 2 to 5, and the reward is the number of the step: returns 3, 6, 10 and 15.
    assert {record["eval_return"] for record in found} == {(3 + 6 + 10 + 15) / 4}
    assert len({record["eval_step"] for record in found}) >= 3
    ledger = summary["ledger"]
    num_evaluations = len({record["eval_step"] for record in found})
    assert ledger["dropped"] >= 6 * num_evaluations, "the episodes that were given up for an evaluation are counted"
    in_books = ledger["trained"] + ledger["dropped"] + ledger["in_flight"] + ledger["handed_over_untrained"]
    assert ledger["started"] == in_books
    assert set(ledger["episodes_by_length"]) <= {str(length) for length in range(2, 8)}
    assert summary["dropped_steps"] == 0 or mode == "continuous"


def test_training_goes_on_with_new_episodes(run_dir: Path) -> None:
    """Segments of 5 steps: after an evaluation the episodes of 7 steps begin anew, so none of them ever ends."""
    options = {**settings_for("sync"), "eval_every": 30, "eval_episodes": 1}
    summary = freerun.train(ENV, **options, total_steps=300, run_dir=run_dir).summary
    assert set(summary["ledger"]["episodes_by_length"]) == {"2", "3", "4", "5"}


def test_what_is_logged_in_an_evaluation_is_not_the_trainings(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counting] = []

    def metrics(env: Counting) -> dict[str, float]:
        made.append(env)
        return {}

    monkeypatch.setattr(Counting, "metrics", metrics)
    options = {**settings_for("sync"), "eval_every": 60}
    freerun.train(ENV, **options, total_steps=120, run_dir=run_dir)
    num_evaluations = len({record["eval_step"] for record in records_of(run_dir) if "eval_step" in record})
    assert len(made) == len(records_of(run_dir)) + num_evaluations


@pytest.mark.parametrize("mode", MODES)
def test_a_simulator_that_fails_in_an_evaluation_ends_the_run(mode: str, run_dir: Path) -> None:
    """In `sync` and in `batch` without lag, the first segment takes 5 steps and the evaluation fails in its second."""
    options = {**settings_for(mode), "eval_every": 30, "env_args": {"fail_after": 6}}
    options |= {} if mode == "continuous" else {"max_lag": 0}
    with pytest.raises(EnvFailure, match="the rotor fell off"):
        freerun.train(ENV, **options, total_steps=10_000, run_dir=run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_too_many_episodes_and_simulators_that_cannot_begin_anew_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--eval-episodes 7 is more than the 6 environments"):
        freerun.train(ENV, **settings_for("sync"), eval_every=30, eval_episodes=7, run_dir=run_dir)
    assert not run_dir.exists()
    monkeypatch.setattr(Counting, "reset_begins_episodes", False, raising=False)
    with pytest.raises(UserError, match="this one cannot be told to"):
        freerun.train(ENV, **settings_for("sync"), eval_every=30, run_dir=run_dir.with_name("other"))


@pytest.mark.parametrize("mode", MODES)
def test_discrete_actions_and_an_evaluation_after_the_last_update(mode: str, run_dir: Path) -> None:
    options = {**settings_for(mode), "eval_every": 30, "env_args": {"num_choices": 3}}
    result = freerun.train(ENV, **options, total_steps=300, run_dir=run_dir)
    assert np.isfinite(result.policy.weights).all()
    assert records_of(run_dir)[-1]["eval_step"] == result.summary["env_steps"]
