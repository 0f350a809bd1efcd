"""`--learner-threads auto` takes idle cores, and gives them back."""

from __future__ import annotations

from pathlib import Path

import pytest

import freerun
from freerun.core import Metrics, UserError
from freerun.run.learner_threads import LearnerThreads


class Machine:
    """A machine with four cores whose load a test sets."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0
        self.load: float | None = None
        self.set_to: list[int] = []
        self.threads = LearnerThreads(
            self.read, self.set_to.append, num_cores=4, clocks=lambda: (self.wall, self.processor)
        )

    def read(self, step: int) -> Metrics:
        return {} if self.load is None else {"cpu_percent": self.load}

    def passes(self, seconds: float, own: float, load: float | None) -> int:
        """Let time pass in which this process used `own` cores and all processes `load` percent of the machine."""
        self.wall += seconds
        self.processor += own * seconds
        self.load = load
        self.threads.write(0, {})
        return self.threads.num_threads


def test_idle_cores_are_taken_and_given_back() -> None:
    machine = Machine()
    # One of four cores is busy with learning: the other three are free.
    assert machine.passes(1.0, own=1.0, load=25.0) == 4
    # All are busy, and three of them are the learner's own: it keeps them.
    assert machine.passes(1.0, own=3.0, load=100.0) == 3
    # Workers push it down to one core.
    assert machine.passes(1.0, own=1.0, load=100.0) == 1
    assert machine.passes(1.0, own=0.2, load=100.0) == 1  # it never has less than one
    assert machine.set_to == [4, 3, 1]  # and torch is told of changes only


def test_short_times_and_unmeasured_loads_change_nothing() -> None:
    machine = Machine()
    assert machine.passes(0.4, own=1.0, load=25.0) == 1
    assert machine.passes(0.4, own=1.0, load=None) == 1
    assert machine.passes(0.4, own=1.0, load=25.0) == 4  # 1.2 s have passed by now
    assert machine.set_to == [4]


def test_it_is_a_setting_of_a_run(tmp_path: Path) -> None:
    result = freerun.train(
        "CartPole-v1", total_steps=2048, learner_threads="auto", quiet=True, run_dir=tmp_path / "run"
    )
    assert result.summary["outcome"] == "finished"
    with pytest.raises(UserError, match="learner"):
        freerun.train("CartPole-v1", total_steps=2048, learner_threads=0, quiet=True, run_dir=tmp_path / "none")
