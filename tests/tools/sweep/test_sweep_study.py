"""The study behind a sweep, without any training: what is pruned, what lies on the front, what a kill leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freerun.settings.registry import make_config
from freerun.tools.sweep import sweep_report
from freerun.tools.sweep.search_space import read_dimensions
from freerun.tools.sweep.sweep_options import SweepOptions
from freerun.tools.sweep.sweep_study import SweepStudy, TrialRow

pytest.importorskip("optuna")
CONFIG = make_config({"env": "CartPole-v1"})
DIMENSIONS = read_dimensions({"learning_rate": "1e-5:1e-2:log", "num_epochs": "1:9"}, CONFIG)
GRID = read_dimensions({"num_epochs": [1, 2, 3]}, CONFIG)


def study(folder: Path, dimensions: Sequence[Any] = DIMENSIONS, **options: Any) -> SweepStudy:
    return SweepStudy(folder, dimensions, SweepOptions(**{"trials": 9, **options}), seed=0)


def asked(own: SweepStudy) -> Any:
    trial = own.ask()
    assert trial is not None
    return trial


def finish(own: SweepStudy, score: float, seconds: float = 1.0, rungs: Sequence[float] = ()) -> None:
    trial = own.ask()
    for rung, value in enumerate(rungs, start=1):
        assert not own.should_prune(trial, rung, value)
    own.complete(trial, score, seconds)


@pytest.mark.parametrize("sampler", ["tpe", "random", "halving"])
def test_settings_lie_within_their_ranges_and_differ(sampler: str, tmp_path: Path) -> None:
    own = study(tmp_path, sampler=sampler)
    while (trial := own.ask()) is not None:
        values = own.values_of(trial)
        assert 1e-5 <= values["learning_rate"] <= 1e-2
        assert values["num_epochs"] in range(1, 10)
        own.complete(trial, 1.0, 1.0)
    rates = [row.parameters["learning_rate"] for row in own.rows()]
    assert len(set(rates)) == len(rates) == 9


def test_a_trial_below_the_median_is_pruned(tmp_path: Path) -> None:
    own = study(tmp_path)
    for score in (10.0, 20.0, 30.0, 40.0, 50.0):
        finish(own, score, rungs=[score] * 5)
    trial = own.ask()
    # The median of the five is 30. No trial is pruned in the first two tenths.
    assert not own.should_prune(trial, 1, 0.0)
    assert not own.should_prune(trial, 2, 0.0)
    assert not own.should_prune(trial, 3, 31.0)
    own.prune(trial, 29.0, 0.5, "worse")
    other = own.ask()
    assert own.should_prune(other, 3, 29.0)
    row = own.rows()[5]
    assert (row.state, row.score, row.seconds, row.reason) == ("pruned", 29.0, 0.5, "worse")


def test_without_prune_and_with_cost_none_is_pruned(tmp_path: Path) -> None:
    choices: list[dict[str, Any]] = [{"prune": False}, {"cost": "seconds"}]
    for place, options in enumerate(choices):
        (folder := tmp_path / str(place)).mkdir()
        own = study(folder, **options)
        for score in range(6):
            finish(own, score, rungs=[score] * 5)
        assert not own.should_prune(own.ask(), 3, -100.0)


def test_halving_lets_the_better_third_go_on(tmp_path: Path) -> None:
    own = study(tmp_path, sampler="halving")
    trials = [own.ask() for _ in range(4)]
    assert not own.should_prune(trials[0], 1, 1.0)
    assert not own.should_prune(trials[1], 1, 2.0)
    # Of three trials one goes on: the best so far, which is 3.
    assert not own.should_prune(trials[2], 1, 3.0)
    assert own.should_prune(trials[3], 1, 0.0)


def test_the_front_holds_what_no_other_trial_beats(tmp_path: Path) -> None:
    own = study(tmp_path, cost="seconds")
    for score, seconds in ((10.0, 1.0), (20.0, 3.0), (15.0, 4.0), (30.0, 9.0), (10.0, 2.0)):
        finish(own, score, seconds)
    assert [row.number for row in own.rows() if row.on_front] == [0, 1, 3]
    assert sweep_report.best_of(own.rows()) == own.rows()[3]


def test_a_grid_tries_each_combination_once(tmp_path: Path) -> None:
    own = study(tmp_path, GRID, sampler="grid", trials=None)
    for _ in range(2):
        finish(own, 1.0)
    own = study(tmp_path, GRID, sampler="grid", trials=None)
    finish(own, 1.0)
    assert own.ask() is None
    assert [row.parameters["num_epochs"] for row in own.rows()] == ["1", "2", "3"]


def test_a_grid_is_whole_even_if_a_kill_came_while_it_was_written(tmp_path: Path) -> None:
    study(tmp_path, GRID, sampler="grid", trials=None)
    journal = tmp_path / "study.log"
    lines = journal.read_text().splitlines(keepends=True)
    # Each line that the kill would have prevented: the study, then each trial of the queue with its settings.
    for count in range(1, len(lines)):
        (folder := tmp_path / str(count)).mkdir()
        (folder / "study.log").write_text("".join(lines[:count]))
        own = study(folder, GRID, sampler="grid", trials=None)
        while (trial := own.ask()) is not None:
            own.complete(trial, 1.0, 1.0)
        assert sorted(row.parameters["num_epochs"] for row in own.rows()) == ["1", "2", "3"]


def test_a_grid_is_whole_even_if_a_kill_came_before_a_trial_knew_its_settings(tmp_path: Path) -> None:
    grid = read_dimensions({"num_epochs": list(range(1, 10))}, CONFIG)
    own = study(tmp_path, grid, sampler="grid", trials=None)
    journal = tmp_path / "study.log"
    length = len(journal.read_text().splitlines())
    asked(own)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: length + 1]))  # the trial was taken from the queue, and no more
    again = study(tmp_path, grid, sampler="grid", trials=None)
    while (trial := again.ask()) is not None:
        again.complete(trial, 1.0, 1.0)
    assert sorted(row.parameters["num_epochs"] for row in again.rows()) == list("123456789")


def test_what_was_running_when_it_was_killed_is_tried_again(tmp_path: Path) -> None:
    own = study(tmp_path)
    finish(own, 5.0)
    failed = own.ask()
    own.fail(failed, "no episode has ended")
    lost = asked(own).params
    # The kill came in the middle of a line, and while Optuna held its lock.
    with (tmp_path / "study.log").open("a") as file:
        file.write('{"op_code": 4, "wor')
    (tmp_path / "study.log.lock").symlink_to("study.log")
    again = study(tmp_path)
    assert [row.state for row in again.rows()] == ["complete", "failed"]
    trial = asked(again)
    assert trial.params == lost
    again.complete(trial, 6.0, 1.0)
    assert asked(again).params != lost
    assert [row.score for row in study(tmp_path).rows()][:3] == [5.0, None, 6.0]


def test_a_resumed_sweep_draws_other_settings_than_its_first_trials(tmp_path: Path) -> None:
    own = study(tmp_path, sampler="random")
    finish(own, 1.0)
    finish(study(tmp_path, sampler="random"), 1.0)
    first, second = (row.parameters["learning_rate"] for row in study(tmp_path).rows())
    assert first != second


def test_the_table_has_the_best_first() -> None:
    rows = [
        TrialRow(0, "complete", {"gamma": 0.5}, 1.0, 2.0),
        TrialRow(1, "failed", {"gamma": 0.25}, reason="no"),
        TrialRow(2, "complete", {"gamma": 0.123456}, 3.0, 4.0, on_front=True),
        TrialRow(3, "pruned", {"gamma": 0.75}, 9.0, 1.0),
    ]
    table = sweep_report.markdown(rows, ["gamma"]).splitlines()
    assert table[2] == "| 2 | 3.00 | 4.0 | complete, on the front | 0.1235 |"
    assert [line.split(" | ")[0] for line in table[2:]] == ["| 2", "| 0", "| 3", "| 1"]
    assert sweep_report.sentence(rows, 1, 8) == "[4/8] trial 1: gamma 0.25: failed (no); best 3.00 (trial 2)"
