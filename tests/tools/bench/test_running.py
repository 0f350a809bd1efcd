"""Which cases are run, in which order, and what happens to jobs that fail or hang."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import preloaded_python
import psutil
import pytest

from freerun.settings.registry import MODES
from freerun.tools.bench.bench_cases import prepare, run_job, steps_per_update, unaffordable
from freerun.tools.bench.bench_job import Job
from freerun.tools.bench.bench_options import BenchOptions

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


def test_all_is_every_mode_and_the_bare_limits() -> None:
    labels = [(case.label, case.num_workers) for case in prepare(BenchOptions("CartPole-v1", workers="4,1")).cases]
    assert {label.partition(":")[0] for label, _ in labels} == {"bare", *MODES}
    assert labels[0] == ("bare", 1)
    assert labels.count(("sequential", 1)) == 1
    assert ("bare", 4) in labels
    assert labels[-1][0] == "ray"  # takes longest to start


def test_modes_that_do_other_work_are_left_out_with_a_sentence() -> None:
    cases = prepare(BenchOptions("freerun/RoughDrone-v0", modes="sync,freerun", workers="2")).cases
    problems = {case.label: case.problem for case in cases}
    assert "as tensors" in (problems["sync"] or "")
    assert problems["freerun"] is None


def test_an_update_has_something_of_every_worker() -> None:
    assert steps_per_update(limit=1000, least=500, seconds=4) == 1000  # a quarter of the run
    assert steps_per_update(limit=1000, least=5000, seconds=4) == 5000
    assert steps_per_update(limit=1e6, least=200, seconds=4) == 10_000


def test_what_takes_longest_is_left_out_first() -> None:
    costs = {"sync": 10.0, "ray": 60.0, "freerun": 10.0}
    assert unaffordable(costs, 80.0) == set()
    assert unaffordable(costs, 79.0) == {"ray"}
    assert unaffordable(costs, 5.0) == set(costs)


@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_a_job_that_is_wrong_says_why() -> None:
    outcome = run_job(Job("NoSuch-v0", "bare", 1, 0.1), 60)
    assert outcome.figures is None
    assert "there is no environment 'NoSuch-v0'" in outcome.problem
    outcome = run_job(Job("toy_envs:Audit", "continuous", 3, 0.1, 100, settings={"num_envs": 4}), 60)
    assert "cannot be shared out evenly" in outcome.problem
    assert outcome.traceback is None


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_bench_jobs")
def test_a_job_that_takes_too_long_is_ended_with_its_workers() -> None:
    preloaded_python.run("-c", "")  # so that the process which starts programs is there before the job
    before, seen = processes(), set()
    job = Job("toy_envs:Audit", "freerun", 2, 1000.0, 100, env_args={"step_seconds": 0.001})
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_job, job, 10.0)
        while not running.done():
            seen |= processes() - before
            time.sleep(0.05)
    outcome = running.result()
    assert outcome.figures is None
    assert "the time was up" in outcome.problem
    assert len(seen) >= 4, "the job, its fork server and two workers"
    _, left = psutil.wait_procs(seen, timeout=10)
    assert not left


def processes() -> set[psutil.Process]:
    """All that this process has started, directly or not."""
    return set(psutil.Process().children(recursive=True))
