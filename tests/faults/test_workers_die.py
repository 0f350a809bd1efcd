"""Workers that die: the episode is run again, with the same result, and the books balance."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from worker_processes import workers

import freerun
from freerun.core import EnvFailure

MODES = ["pipes", "executor", "freerun", "ray"]
SETTINGS = {
    "total_episodes": 60,
    "episodes_per_update": 20,
    "num_epochs": 1,
    "deterministic": True,
    "quiet": True,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_dies_costs_nothing_but_time(mode: str, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    env_args = {"path": str(mark)}
    result = freerun.train(
        "toy_envs:DiesOnce", mode=mode, num_workers=3, env_args=env_args, run_dir=tmp_path / "run", **SETTINGS
    )
    assert mark.exists(), "no worker died"
    reference = freerun.train(
        "toy_envs:DiesOnce", mode="sequential", env_args=env_args, run_dir=tmp_path / "reference", **SETTINGS
    )
    np.testing.assert_array_equal(result.policy.weights, reference.policy.weights)
    assert result.summary["worker_restarts"] == 1
    ledger = result.summary["ledger"]
    assert ledger["rerun"] >= 1
    assert ledger["started"] == ledger["trained"] == 60


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_die_each_time_end_the_run_with_a_word(mode: str, tmp_path: Path) -> None:
    with pytest.raises(EnvFailure, match=r"died|broke"):
        freerun.train(
            "toy_envs:Broken", mode=mode, num_workers=2, env_args={"how": "die"}, run_dir=tmp_path / "run", **SETTINGS
        )


@pytest.mark.parametrize("mode", MODES)
def test_workers_killed_from_outside_at_random_moments(mode: str, tmp_path: Path) -> None:
    stop = threading.Event()
    killed: list[int] = []

    def kill_now_and_then() -> None:
        rng = np.random.default_rng(0)
        while not stop.wait(0.9) and len(killed) < 3:
            at_work = sorted(pid for pid in workers() if _has_lived(pid))
            if at_work:
                pid = at_work[int(rng.integers(len(at_work)))]
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        result = freerun.train(
            "toy_envs:Audit",
            mode=mode,
            num_workers=4,
            max_lag=1,
            env_args={"step_seconds": 0.002},
            total_episodes=60,
            episodes_per_update=20,
            num_epochs=1,
            quiet=True,
            run_dir=tmp_path / "run",
        )
    finally:
        stop.set()
        killer.join()
    assert killed, "nobody was killed"
    assert result.summary["ledger"]["trained"] == 60
    assert result.summary["worker_restarts"] >= 1


def _has_lived(pid: int) -> bool:
    """Long enough to be at work."""
    try:
        return time.time() - psutil.Process(pid).create_time() > 0.2
    except psutil.NoSuchProcess:
        return False
