"""`--learner-threads auto` takes idle cores, gives them back, and keeps only threads that make updates faster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import freerun
from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.core import Metrics, UserError
from freerun.persistence.metric_records import read_records
from freerun.run.learner_threads import RETRY_SECONDS, LearnerThreads
from freerun.run.replay_run import replay
from freerun.settings.factories import limit_threads

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


class Machine:
    """A machine with four cores whose load a test sets."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0
        self.step = 0
        self.load: float | None = None
        self.set_to: list[int] = []
        self.threads = LearnerThreads(
            self.read, self.set_to.append, num_cores=4, most_threads=4, clocks=lambda: (self.wall, self.processor)
        )

    def read(self, step: int) -> Metrics:
        return {} if self.load is None else {"cpu_percent": self.load}

    def passes(self, seconds: float, own: float, load: float | None, updating: float = 1.0, speed: float = 0.0) -> int:
        """Let time pass in which this process used `own` cores and all processes `load` percent of the machine.

        `speed` is how many steps are learned from in a second; if it is left out, it grows with the threads."""
        self.wall += seconds
        self.processor += own * seconds
        self.step += round(seconds * (speed or 100 * self.threads.num_threads))
        self.load = load
        self.threads.write(self.step, {"learner_updating_share": updating, "interval_seconds": seconds})
        assert self.threads.read(self.step) == {"learner_threads": self.threads.num_threads}
        return self.threads.num_threads


def test_idle_cores_are_taken_and_given_back() -> None:
    machine = Machine()
    # One of four cores is busy with learning: the other three are free. One measurement is none to compare with.
    assert [machine.passes(1.0, own=1.0, load=25.0) for _ in range(2)] == [1, 2]
    assert [machine.passes(1.0, own=2.0, load=50.0) for _ in range(2)] == [2, 4]
    # All are busy, and three of them are the learner's own: it keeps them.
    assert machine.passes(1.0, own=3.0, load=100.0) == 3
    # Workers push it down to one core.
    assert machine.passes(1.0, own=1.0, load=100.0) == 1
    assert machine.passes(1.0, own=0.2, load=100.0) == 1  # it never has less than one
    assert machine.set_to == [2, 4, 3, 1]  # and numpy or torch is told of changes only


def test_a_core_that_is_nearly_idle_is_taken_and_one_that_is_half_busy_is_not() -> None:
    machine = Machine()
    # The display and the workers' pipes take some per cent of the other three cores.
    assert [machine.passes(1.0, own=0.97, load=28.0) for _ in range(2)] == [1, 2]
    assert [machine.passes(1.0, own=1.9, load=55.0) for _ in range(2)] == [2, 4]
    # A worker takes more than half of a core.
    assert machine.passes(1.0, own=3.3, load=100.0) == 3


def test_threads_that_do_not_pay_are_given_back_and_tried_again_much_later() -> None:
    machine = Machine()
    assert [machine.passes(1.0, own=1.0, load=25.0, speed=100) for _ in range(2)] == [1, 2]
    assert machine.passes(1.0, own=2.0, load=50.0, speed=105) == 1  # faster by less than a tenth
    for _ in range(round(RETRY_SECONDS) - 1):
        assert machine.passes(1.0, own=1.0, load=25.0, speed=100) == 1
    assert machine.passes(1.0, own=1.0, load=25.0, speed=100) == 2


def test_work_that_changes_is_not_compared() -> None:
    """After the first random steps, each step costs much more, however many threads there are."""
    machine = Machine()
    assert machine.passes(1.0, own=1.0, load=25.0, speed=1000) == 1
    assert machine.passes(1.0, own=1.0, load=25.0, speed=100) == 1
    assert machine.passes(1.0, own=1.0, load=25.0, speed=100) == 2
    assert machine.passes(1.0, own=2.0, load=50.0, speed=150) == 2  # it pays, and is kept


def test_a_learner_that_waits_for_data_gets_no_more_threads() -> None:
    machine = Machine()
    assert [machine.passes(1.0, own=0.3, load=10.0, updating=0.3) for _ in range(3)] == [1, 1, 1]
    assert machine.set_to == []


def test_short_times_and_unmeasured_loads_change_nothing() -> None:
    machine = Machine()
    assert machine.passes(0.4, own=1.0, load=25.0) == 1
    assert machine.passes(0.8, own=1.0, load=None) == 1
    assert machine.passes(0.4, own=1.0, load=25.0) == 1  # 1.6 s have passed by now, for the first measurement
    assert machine.passes(0.9, own=1.0, load=25.0) == 1
    assert machine.passes(0.2, own=1.0, load=25.0) == 2
    assert machine.set_to == [2]


def test_threads_at_the_beginning_are_given_back_to_workers() -> None:
    machine = Machine()
    machine.threads.begin_with(3)
    assert machine.set_to == [3]
    assert machine.passes(1.0, own=3.0, load=80.0) == 3
    assert machine.passes(1.0, own=1.0, load=100.0) == 1
    assert machine.set_to == [3, 1]


def test_beginning_with_one_thread_or_less_changes_nothing() -> None:
    machine = Machine()
    for num_threads in (1, 0, -2):
        machine.threads.begin_with(num_threads)
    assert (machine.threads.num_threads, machine.set_to) == (1, [])


def threads_of_updates(run_dir: Path) -> list[int]:
    return [int(record["learner_threads"] or 0) for record in read_records(run_dir / "metrics.jsonl")]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("num_cores", "num_workers", "minibatch_size", "first"),
    [(16, 12, 256, 3), (16, 4, 256, 8), (16, 4, 64, 2), (2, 1, 256, 1), (2, 4, 256, 1)],
)
def test_the_kernel_begins_on_the_cores_that_workers_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_workers: int, minibatch_size: int, first: int
) -> None:
    monkeypatch.setattr("freerun.run.learner_threads.usable_cores", lambda: range(num_cores))
    freerun.train(
        "CartPole-v1", total_steps=600, steps_per_update=512, num_epochs=1, num_workers=num_workers, quiet=True,
        minibatch_size=minibatch_size, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert threads_of_updates(tmp_path / "run")[0] == first
    kernel = compiled_kernel()
    assert kernel is not None
    assert kernel.num_threads() == 1  # nothing waits for work any more


@NEEDS_COMPILER
def test_the_kernels_threads_change_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run with --deterministic may have them, ends with the weights that one thread gives, and can be replayed."""
    weights = []
    for num_cores in (1, 16):
        monkeypatch.setattr("freerun.run.learner_threads.usable_cores", lambda count=num_cores: range(count))
        run_dir = tmp_path / f"{num_cores}"
        result = freerun.train(
            "CartPole-v1", total_steps=3000, steps_per_update=1000, minibatch_size=500, num_epochs=2, quiet=True,
            run_dir=run_dir, deterministic=True,
        )  # fmt: skip
        assert max(threads_of_updates(run_dir)) == min(num_cores, 8)
        weights.append(result.policy.weights)
    np.testing.assert_array_equal(*weights)

    def never(*_: object) -> None:
        raise AssertionError("a replay of the kernel's updates has no use for their threads")

    monkeypatch.setattr("freerun.run.replay_run.set_learner_threads", never)
    assert replay(tmp_path / "16").is_same


@NEEDS_COMPILER
def test_a_number_of_threads_is_the_kernels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr("freerun.settings.factories.set_kernel_threads", set_to.append)
    freerun.train("CartPole-v1", total_steps=300, learner_threads=3, quiet=True, run_dir=tmp_path / "run")
    assert set_to == [1, 3]
    assert "learner_threads" not in next(iter(read_records(tmp_path / "run" / "metrics.jsonl")))


def test_it_is_a_setting_of_a_run(tmp_path: Path) -> None:
    result = freerun.train("CartPole-v1", total_steps=2048, quiet=True, run_dir=tmp_path / "run")
    assert result.summary["outcome"] == "finished"
    with pytest.raises(UserError, match="learner"):
        freerun.train("CartPole-v1", total_steps=2048, learner_threads=0, quiet=True, run_dir=tmp_path / "none")


@pytest.mark.parametrize(("learner", "is_reported"), [("fast", True), ("numpy", False), ("torch", True)])
def test_all_but_numpy_get_more_threads_by_themselves(tmp_path: Path, learner: str, is_reported: bool) -> None:
    """Threads of numpy wait for each other at every product, which takes far too long beside other programs."""
    freerun.train("CartPole-v1", total_steps=2048, learner=learner, quiet=True, run_dir=tmp_path / "run")
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert all(("learner_threads" in record) is is_reported for record in records)


@pytest.fixture
def one_thread() -> Iterator[None]:
    yield
    limit_threads(1, 1)


@pytest.mark.parametrize("learner", ["fast", "torch"])
@pytest.mark.usefixtures("one_thread")
def test_only_those_who_compute_gradients_have_several_threads(tmp_path: Path, learner: str) -> None:
    """Torch and numpy with several threads each would wait for each other's at every product."""
    freerun.train(
        "Pendulum-v1", algo="sac", mode="sequential", total_steps=300, learner=learner, learner_threads=2, quiet=True,
        run_dir=tmp_path / "run", hidden_sizes=(8,), batch_size=8,
    )  # fmt: skip
    of_numpy = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    assert (torch.get_num_threads(), of_numpy) == ((1, {2}) if learner == "fast" else (2, {1}))


@pytest.mark.usefixtures("one_thread")
def test_a_replay_computes_each_update_with_the_threads_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that takes a second thread after its first updates is replayed with two threads from there on."""
    monkeypatch.setattr("freerun.run.learner_threads.MEASURE_SECONDS", 0.0)
    monkeypatch.setattr("freerun.run.learner_threads.BUSY_SHARE", -1.0)
    monkeypatch.setattr("freerun.run.learner_threads.STEADY", float("inf"))
    monkeypatch.setattr("freerun.run.learner_threads.usable_cores", lambda: {0, 1})
    monkeypatch.setattr("freerun.telemetry.machine_load.MachineLoad.read", lambda self, step: {"cpu_percent": 0.0})
    run_dir = tmp_path / "run"
    freerun.train(
        "CartPole-v1", mode="sequential", total_steps=600, steps_per_update=100, learner="torch", quiet=True,
        run_dir=run_dir,
    )  # fmt: skip
    used = [record["learner_threads"] for record in read_records(run_dir / "metrics.jsonl")]
    assert 2 in used
    seen: list[int] = []
    monkeypatch.setattr(
        "freerun.run.replay_run.set_learner_threads", lambda config, algorithm, number: seen.append(number)
    )
    assert replay(run_dir).is_same
    assert seen == used
