"""What every mode owes whose workers hand over parts of episodes and wait for nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from worker_processes import after_updates, workers

import freerun

pytestmark = pytest.mark.parametrize("mode", ["freerun", "ray"])


def train(mode: str, run_dir: Path, **settings: Any) -> dict[str, Any]:
    result = freerun.train(
        "toy_envs:Audit", mode=mode, num_workers=2, num_epochs=1, quiet=True, run_dir=run_dir, **settings
    )
    summary: dict[str, Any] = result.summary
    return summary


def test_the_books_balance_and_long_episodes_have_their_share(mode: str, run_dir: Path) -> None:
    sizes = {"envs_per_worker": 10, "segment_steps": 50, "steps_per_update": 2000, "minibatch_size": 5000}
    summary = train(mode, run_dir, **sizes, max_lag=4, total_steps=200_000 if mode == "freerun" else 100_000)
    ledger = summary["ledger"]
    assert ledger["started"] == ledger["trained"] + ledger["handed_over_untrained"]
    assert ledger["cut"] == ledger["in_flight"] == 0
    long, short = (ledger["episodes_by_length"][length] for length in ("200", "20"))
    # Of 1,800 (or 900) episodes half are long (± 0.012, or 0.017); those unfinished at the end are mostly long.
    assert 0.45 < long / (long + short) < 0.55
    assert 1 <= summary["lag_max"] <= 4


def test_a_worker_that_is_killed_leaves_its_episodes_cut_and_training_goes_on(mode: str, run_dir: Path) -> None:
    before = workers()
    sizes = {"envs_per_worker": 4, "segment_steps": 25, "steps_per_update": 400, "total_steps": 8000}
    with after_updates(run_dir, 3, lambda: os.kill(min(workers() - before), signal.SIGKILL)):
        summary = train(mode, run_dir, **sizes, env_args={"step_seconds": 0.0005})
    ledger = summary["ledger"]
    assert summary["worker_restarts"] == 1
    assert 0 < ledger["cut"] <= 4
    assert ledger["started"] == ledger["trained"] + ledger["handed_over_untrained"] + ledger["cut"]
