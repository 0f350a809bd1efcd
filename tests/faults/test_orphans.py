"""However a run ends, nothing of it is left: no process, no shared memory, no temporary file."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import OutsideRun

from freerun.settings import registry

pytestmark = [pytest.mark.slow, pytest.mark.own_ray]

WITHIN_SECONDS = 20.0
"""Generous, because the janitor of Ray looks at every process of a busy machine. Nobody waits once all is gone."""
ENDLESS = ["--total-steps", "100000000", "--num-epochs", "1"]


def options(mode: str) -> list[str]:
    if mode == "continuous":
        return [
            "--num-collectors",
            "2",
            "--num-envs",
            "2",
            "--collection-batch-size",
            "16",
            "--collector-kind",
            "process",
        ]
    if mode == "batch":
        return ["--num-envs", "2", "--num-steps-per-env", "16"]
    return ["--episodes-per-update", "8", *([] if mode == "sequential" else ["--num-workers", "2"])]


def start(
    mode: str, run_dir: Path, how: str = "never", limit: list[str] = ENDLESS, is_preloaded: bool = True
) -> OutsideRun:
    env_args = ["--env-args", "path", f"{run_dir}-mark", "how", how, "step_seconds", "0.001"]
    words = ["toy_envs:FailsOnce", *env_args, "--mode", mode, *options(mode), *limit]
    return OutsideRun(words, run_dir, is_preloaded=is_preloaded)


@pytest.mark.parametrize("mode", registry.MODES)
def test_a_kill_of_the_learner_takes_everything_with_it(mode: str, run_dir: Path) -> None:
    """Also workers that are stuck: they hear nothing, but the kernel ends them."""
    with start(mode, run_dir, "hang" if mode in ("pipes", "freerun", "continuous") else "never") as run:
        if mode in ("pipes", "freerun"):
            wait_for_file(run, Path(f"{run_dir}-mark"))
        else:
            run.wait_for_updates(2)
        assert run.family()
        run.process.kill()
        run.process.wait(10)
        assert not run.left_after(WITHIN_SECONDS)


def wait_for_file(run: OutsideRun, path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, run.text
        time.sleep(0.05)
    run.family()


@pytest.mark.parametrize("mode", ["sync", "executor", "freerun", "ray"])
def test_a_kill_of_the_whole_group_too(mode: str, run_dir: Path) -> None:
    """Here, and at the end of this file, Python starts as for a user, with whatever it starts along with itself."""
    with start(mode, run_dir, is_preloaded=False) as run:
        run.wait_for_updates(2)
        run.family()
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        assert not run.left_after(WITHIN_SECONDS)


def twice(run: OutsideRun) -> None:
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)


ENDS: dict[str, Callable[[OutsideRun], None]] = {
    "Ctrl-C": lambda run: run.process.send_signal(signal.SIGINT),
    "Ctrl-C twice": twice,
    "SIGTERM": lambda run: run.process.send_signal(signal.SIGTERM),
    "SIGHUP": lambda run: run.process.send_signal(signal.SIGHUP),
}


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        *(("freerun", end) for end in ENDS),
        ("sync", "Ctrl-C"),
        ("executor", "Ctrl-C"),
        ("ray", "Ctrl-C"),
    ],
)
def test_signals_end_a_run_and_keep_what_was_learned(mode: str, end: str, run_dir: Path) -> None:
    with start(mode, run_dir) as run:
        run.wait_for_updates(2)
        run.family()
        ENDS[end](run)
        exit_code = run.process.wait(40)
        assert not run.left_after(WITHIN_SECONDS)
        if end != "Ctrl-C twice":  # which may come before anything is written
            assert exit_code == 130, run.text
            assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"


@pytest.mark.parametrize(("mode", "how"), [("freerun", "never"), ("freerun", "raise-always"), ("ray", "raise-always")])
def test_success_and_failure_leave_nothing(mode: str, how: str, run_dir: Path) -> None:
    limit = ["--total-episodes", "16", "--num-epochs", "1"]
    with start(mode, run_dir, how, limit, is_preloaded=False) as run:
        assert run.process.wait(90) == (0 if how == "never" else 1), run.text
        assert ("ZeroDivisionError" in run.text) == (how != "never")
        assert not run.left_after(WITHIN_SECONDS)
