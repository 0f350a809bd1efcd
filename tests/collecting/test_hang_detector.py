"""Who counts as silent, and what happens to a worker that hangs: with fake workers and a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from freerun.collecting.workers.hang_detector import Activity, HangDetector, SignOfLife, SilenceClock
from freerun.core import CollectorSettings, WorkerHung, episode_seed


class Watched:
    """A worker whose state the test sets."""

    def __init__(self, index: int = 0):
        self.index = index
        self.activity = Activity.BUSY
        self.num_beats = 0
        self.pid = 7
        self.stopped = False
        self.placed = True
        self.moves_while_examined = False
        self.num_slow_starts = 0
        self.hung: list[WorkerHung] = []

    def sign_of_life(self) -> SignOfLife:
        return SignOfLife(self.pid, self.activity, self.num_beats)

    def episode(self) -> int | None:
        return 5

    def is_stopped(self) -> bool:
        return self.stopped

    def has_place(self) -> bool:
        return self.placed

    def stack(self) -> str:
        self.num_beats += self.moves_while_examined
        return "in stuck_for_ever"

    def note_slow_start(self) -> None:
        self.num_slow_starts += 1

    def end_hung(self, failure: WorkerHung) -> None:
        self.hung.append(failure)


class Watch:
    """A detector with a timeout of 2 s that looks every 0.2 s of the test's own time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.worker = Watched()
        self.detector = HangDetector(CollectorSettings(1, 0, 3, step_timeout=2.0), lambda: [self.worker], 0.2)

    def let_pass(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            self.detector.look()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_a_busy_worker_that_is_silent_is_ended_with_its_stack_episode_and_seed(watch: Watch) -> None:
    watch.let_pass(1.8)
    assert not watch.worker.hung
    watch.let_pass(0.6)
    (failure,) = watch.worker.hung
    assert f"in a step of episode 5 (seed {episode_seed(3, 5)})" in str(failure)
    assert "(--step-timeout 2); its stack:\nin stuck_for_ever" in str(failure)
    assert not failure.from_outside


def test_a_worker_that_waits_may_be_silent_but_not_stopped(watch: Watch) -> None:
    watch.worker.activity = Activity.WAITING
    watch.let_pass(10.0)
    assert not watch.worker.hung
    watch.worker.stopped = True
    watch.let_pass(2.0)
    failure = watch.worker.hung[0]
    assert failure.from_outside
    assert "it was stopped by a signal" in str(failure)


def test_a_worker_that_makes_steps_is_left_alone(watch: Watch) -> None:
    for _ in range(20):
        watch.worker.num_beats += 1
        watch.let_pass(1.0)
    assert not watch.worker.hung


def test_a_successor_does_not_inherit_the_silence(watch: Watch) -> None:
    watch.let_pass(1.8)
    watch.worker.pid = 8
    watch.let_pass(1.8)
    assert not watch.worker.hung


def test_a_start_may_take_a_minute_and_is_noted_as_slow_before(watch: Watch) -> None:
    watch.worker.activity = Activity.STARTING
    watch.let_pass(58.0)
    assert not watch.worker.hung
    assert watch.worker.num_slow_starts > 0
    watch.let_pass(4.0)
    assert "while it was starting" in str(watch.worker.hung[0])


def test_a_worker_without_a_process_waits_as_long_as_it_takes(watch: Watch) -> None:
    watch.worker.activity, watch.worker.placed = Activity.STARTING, False
    watch.let_pass(200.0)
    assert not watch.worker.hung


def test_a_worker_that_goes_on_while_its_stack_is_taken_is_spared(watch: Watch) -> None:
    watch.worker.moves_while_examined = True
    watch.let_pass(2.4)
    assert not watch.worker.hung


def test_silence_counts_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence = SilenceClock(interval_seconds=0.25)
    silence.look({0: 5, 1: 5})
    for beats in range(10):
        now += 0.25
        silence.look({0: 5, 1: beats})
    assert silence.seconds(0) == pytest.approx(2.5)
    assert silence.seconds(1) == 0.0
    now += 3600  # the machine was asleep
    silence.look({0: 5, 1: 9})
    assert silence.seconds(0) <= 3.5
    assert silence.seconds(1) <= 1.0
