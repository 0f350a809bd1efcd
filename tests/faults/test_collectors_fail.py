"""Modes that go on whatever happens to a collector: it is started again, and the run ends only if nothing works."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_processes import workers

import freerun
from freerun.core import EnvFailure

THREADS = {"mode": "continuous", "collector_kind": "thread", "num_collectors": 2, "num_envs": 4}
PROCESSES = {**THREADS, "collector_kind": "process"}
BATCH = {"mode": "batch", "num_envs": 4, "num_steps_per_env": 8}
SETTINGS: dict[str, Any] = {"steps_per_update": 128, "num_epochs": 1, "minibatch_size": 128, "quiet": True}


def assert_books_balance(summary: dict[str, Any]) -> None:
    ledger = summary["ledger"]
    names = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    assert ledger["started"] == sum(ledger[name] for name in names)


@pytest.mark.parametrize(
    ("mode", "how", "message"),
    [
        (THREADS, "raise", r"with seed \d+[\s\S]*ZeroDivisionError: the simulator fell over"),
        (PROCESSES, "raise", r"with seed \d+[\s\S]*ZeroDivisionError: the simulator fell over"),
        (BATCH, "raise", r"with seed \d+[\s\S]*ZeroDivisionError: the simulator fell over"),
        (THREADS, "reset", "ZeroDivisionError: the simulator did not start"),
        (PROCESSES, "reset", "ZeroDivisionError: the simulator did not start"),
        (THREADS, "nan", r"observation that is not finite at step 4 of episode \d+ \(seed \d+\)"),
        (PROCESSES, "nan", r"observation that is not finite at step 4 of episode \d+ \(seed \d+\)"),
        (BATCH, "inf", r"reward that is not finite at step 3 of episode \d+ \(seed \d+\)"),
        (THREADS, "exit", r"the environment called sys.exit\(3\)"),
        (PROCESSES, "die", "died with exit code 7"),
        (BATCH, "die", "died with exit code 7"),
    ],
)
def test_training_goes_on(
    mode: dict[str, Any], how: str, message: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = {} if mode is BATCH else {"collection_batch_size": 16, "max_queue_size": 20}
    result = freerun.train(
        "toy_envs:Faulty", env_args={"how": how}, total_steps=1500, run_dir=run_dir, **mode, **size, **SETTINGS
    )
    summary = result.summary
    assert summary["outcome"] == "finished"
    assert summary["worker_restarts"] >= 1
    assert (summary["segments_rejected"] >= 1) == (how in ("nan", "inf"))
    assert_books_balance(summary)
    assert summary["ledger"]["episodes_by_length"].keys() <= {"5", "30"}
    assert np.isfinite(result.policy.weights).all()
    assert any(re.search(message, record.getMessage()) for record in caplog.records if record.name == "freerun")


@pytest.mark.parametrize("mode", [PROCESSES, BATCH])
def test_collectors_killed_from_outside(mode: dict[str, Any], run_dir: Path) -> None:
    before = workers()

    def kill_one() -> None:
        deadline = time.monotonic() + 30
        metrics = run_dir / "metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.01)
        os.kill(min(workers() - before), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    result = freerun.train(
        "toy_envs:Audit", env_args={"step_seconds": 0.0002}, total_steps=6000, run_dir=run_dir, **mode, **SETTINGS
    )
    killer.join()
    assert result.summary["worker_restarts"] == 1
    assert_books_balance(result.summary)
    assert result.summary["ledger"]["episodes_by_length"].keys() <= {"20", "200"}


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("mode", [THREADS, PROCESSES, BATCH])
def test_an_environment_that_always_fails_ends_the_run_with_its_error(mode: dict[str, Any], run_dir: Path) -> None:
    with pytest.raises(
        EnvFailure, match=r"8 times in a row while nobody finished anything[\s\S]*the simulator fell over"
    ):
        freerun.train("toy_envs:Broken", env_args={"how": "raise"}, run_dir=run_dir, **mode, **SETTINGS)
