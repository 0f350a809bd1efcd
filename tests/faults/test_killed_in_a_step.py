"""Workers killed from outside in the middle of `env.step`, one after another: the run goes on within --max-failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from leftovers import OutsideRun
from sealed_env import ask_for_victim

pytestmark = [pytest.mark.slow, pytest.mark.own_ray]

NUM_KILLS = {"sync": 9, "pipes": 9, "executor": 9, "freerun": 9, "continuous": 9, "batch": 9, "ray": 9}
"""Enough for one of two workers to be killed nine times before anybody finishes an episode; `batch` has one process."""
WITHIN_SECONDS = 5.0


def start(mode: str, run_dir: Path, *words: str) -> OutsideRun:
    """Episodes of 30 to 60 steps, so that in `sync` and `executor` none is finished between two kills."""
    victims = victims_of(run_dir)
    victims.mkdir()
    env_args = ["--env-args", "step_seconds", "0.002", "shortest", "30", "longest", "60", "victims", str(victims)]
    size = {
        "continuous": ["--num-collectors", "2", "--num-envs", "2", "--collector-kind", "process"],
        "batch": ["--num-envs", "2", "--num-steps-per-env", "16"],
    }.get(mode, ["--num-workers", "2", "--episodes-per-update", "4"])
    words = ("sealed_env:Sealed", *env_args, "--mode", mode, *size, "--num-epochs", "1", *words)
    return OutsideRun(words, run_dir, ["-m", "brisk_freerun", "train"])


def victims_of(run_dir: Path) -> Path:
    return run_dir.with_name("victims")


def kill_in_a_step(run: OutsideRun, num_kills: int) -> int:
    """Kills so many workers, each in the middle of a step, without a pause; returns how many before the run ended."""
    num_killed = 0
    run.wait_for_updates(1)
    run.family()
    while num_killed < num_kills and run.process.poll() is None:
        pid = ask_for_victim(victims_of(run.run_dir), 2.0)
        with contextlib.suppress(ProcessLookupError):  # it fell with one that was killed before
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                num_killed += 1
    return num_killed


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", NUM_KILLS)
def test_a_run_goes_on_however_many_are_killed_in_a_row(mode: str, run_dir: Path) -> None:
    with start(mode, run_dir, "--total-steps", "3000") as run:
        assert kill_in_a_step(run, NUM_KILLS[mode]) == NUM_KILLS[mode], run.text
        assert run.process.wait(120) == 0, run.text
        assert not run.left_after(WITHIN_SECONDS)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    # A kill may hit a process that is being ended with another one, but nobody fails who was not killed.
    assert NUM_KILLS[mode] // 2 <= summary["worker_restarts"] <= NUM_KILLS[mode]
    assert summary["incidents"] == {"death": summary["worker_restarts"]}
    ledger = summary["ledger"]
    names = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    assert ledger["started"] == sum(ledger[name] for name in names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "executor", "freerun", "ray"])
def test_more_kills_than_the_budget_end_the_run_with_that_word(mode: str, run_dir: Path) -> None:
    with start(mode, run_dir, "--total-steps", "1000000", "--max-failures", "3") as run:
        assert kill_in_a_step(run, 100) < 100, "kills do not count"
        assert run.process.wait(60) == 1, run.text
        assert "and --max-failures is 3" in run.text
        assert not run.left_after(WITHIN_SECONDS)
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"
