"""When a failed worker is started again, when the run ends, and who counts as silent."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freerun.collecting.scheduling.units import REPEAT_EPISODES, SKIP_EPISODES
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import CollectorSettings, EnvFailure, Incident, NotFinite, UserError, WorkerDied
from freerun.transport import processes
from freerun.transport.exit_diagnosis import ExitDiagnosis, is_stopped
from freerun.transport.heartbeats import Heartbeats
from freerun.transport.stack_capture import StackFile

WORKERS = strategies.integers(0, 3)
MOST = strategies.integers(0, 12)
ON_NAN = strategies.sampled_from(["stop", "continue"])


class RestartPolicyMachine(RuleBasedStateMachine):
    """Beside a plain account of what happened: the run ends when a rule says so, and only then."""

    @initialize(most=MOST, tolerant=strategies.booleans(), on_nan=ON_NAN)
    def begin(self, most: int, tolerant: bool, on_nan: str) -> None:
        self._begin(most, tolerant, on_nan)

    def _begin(self, most: int, tolerant: bool, on_nan: str) -> None:
        self.told: list[Incident] = []
        self.now = 0.0
        chosen = CollectorSettings(4, 0, 7, max_failures=most, on_nan=on_nan, report=self.told.append)  # type: ignore[arg-type]
        self.most, self.tolerant, self.on_nan = most, tolerant, on_nan
        self.policy = RestartPolicy(chosen, SKIP_EPISODES if tolerant else REPEAT_EPISODES, clock=lambda: self.now)
        self.fruitless: Counter[int] = Counter()
        self.fruitless_unseen: Counter[int] = Counter()
        self.has_delivered = False
        self.of_episode: Counter[int] = Counter()
        self.rests: Counter[int] = Counter()
        self.num_failures = self.num_incidents = 0
        self.over = False

    @precondition(lambda self: self.over)
    @rule(most=MOST, tolerant=strategies.booleans(), on_nan=ON_NAN)
    def another_run(self, most: int, tolerant: bool, on_nan: str) -> None:
        self._begin(most, tolerant, on_nan)

    @precondition(lambda self: not self.over)
    @rule(worker=WORKERS)
    def deliver(self, worker: int) -> None:
        self.policy.delivered(worker)
        self.fruitless.clear()
        self.fruitless_unseen.clear()
        self.has_delivered = True
        self.rests[worker] = 0

    @precondition(lambda self: not self.over)
    @rule(worker=WORKERS, episode=strategies.integers(0, 5), bad=strategies.booleans())
    def fail(self, worker: int, episode: int, bad: bool) -> None:
        failure: Exception = NotFinite("nan") if bad else EnvFailure("it raised")
        self.num_incidents += 1
        self.fruitless[worker] += 1
        self.rests[worker] += 1
        goes_on = bad and self.on_nan == "continue"
        tries = 8 if self.tolerant or goes_on else 3
        self.num_failures += not goes_on
        self.of_episode[episode] += not (self.tolerant or goes_on)
        ends = (
            (bad and not goes_on)
            or self.fruitless[worker] >= tries
            or (self.of_episode[episode] >= 3 and not (self.tolerant or goes_on))
            or self.num_failures > self.most
        )
        try:
            seconds = self.policy.failed(worker, failure, [episode])
        except (EnvFailure, UserError) as end:
            self.over = True
            told, kind = str(end), type(end)
        assert self.over == ends
        if ends:
            assert str(failure) in told
            assert kind is type(failure)
        else:
            assert seconds == (0.0 if self.rests[worker] == 1 else min(5.0, 0.1 * 2 ** (self.rests[worker] - 2)))

    @precondition(lambda self: not self.over)
    @rule(was_seen=strategies.booleans())
    def a_machine_is_lost(self, was_seen: bool) -> None:
        """Its workers fall together: one failure. Only where nobody saw how, the environment may be the cause."""
        self.num_failures += 1
        self.now += 1e9  # long after the last one
        for worker in range(4):
            failure = WorkerDied("killed")
            failure.from_outside, failure.may_be_the_environment = True, not was_seen
            self.num_incidents += 1
            self.fruitless_unseen[worker] += 1
            self.rests[worker] += 1
            is_hopeless = not was_seen and not self.has_delivered and self.fruitless_unseen[worker] >= 8
            ends = self.num_failures > self.most or is_hopeless
            try:
                self.policy.failed(worker, failure, [worker])
            except EnvFailure:
                assert ends
                self.over = True
                return
            assert not ends

    @invariant()
    def everything_was_told(self) -> None:
        assert len(self.told) == self.num_incidents
        assert sum(self.policy.failures_by_kind.values()) == self.num_incidents


def killed(worker: int) -> WorkerDied:
    failure = WorkerDied(f"worker {worker} died of SIGKILL, which freerun did not send")
    failure.from_outside = True
    return failure


def test_kills_from_outside_use_up_the_budget_and_nothing_else() -> None:
    """Nobody finishes anything meanwhile; two errors of the environment's own in between are still only two."""
    policy = RestartPolicy(CollectorSettings(1, 0, 7, max_failures=2000))
    for number in range(1500):
        seconds = policy.failed(0, killed(0), [3])
        assert seconds == (0.0 if number == 0 else min(5.0, 0.1 * 2 ** (min(number, 20) - 1)))
    for _ in range(2):
        policy.failed(0, EnvFailure("it raised"), [3])
    assert policy.num_failures == 1502
    with pytest.raises(EnvFailure, match="worker 0 failed 3 times in a row while nobody finished anything"):
        policy.failed(0, EnvFailure("it raised"), [4])


def test_kills_without_a_pause_use_up_the_budget_too() -> None:
    """Every 0.3 s another worker: those of a second count once, counted from the first of them; 0.0, 1.2, 2.4, …"""
    now = 100.0
    policy = RestartPolicy(CollectorSettings(100, 0, 7, max_failures=3), clock=lambda: now)
    for worker in range(12):
        policy.failed(worker, killed(worker))
        now += 0.3
    assert policy.num_failures == 3
    with pytest.raises(EnvFailure, match=r"workers failed 4 times \(13 × death\), and --max-failures is 3"):
        policy.failed(12, killed(12))


def test_the_same_worker_killed_twice_is_two_failures() -> None:
    policy = RestartPolicy(CollectorSettings(4, 0, 7))
    for worker in (0, 1, 0):
        policy.failed(worker, killed(worker))
    assert policy.num_failures == 2


TestRestartPolicy = RestartPolicyMachine.TestCase
TestRestartPolicy.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_a_process_died_of() -> None:
    diagnosis = ExitDiagnosis()
    assert "which freerun did not send" in str(diagnosis.diagnose(2, 18, -signal.SIGKILL))
    assert "SIGSEGV" in str(diagnosis.diagnose(2, 19, -signal.SIGSEGV))
    assert "exit code 3" in str(diagnosis.diagnose(2, 20, 3))


def stuck(stacks: StackFile, heartbeats: Heartbeats) -> None:
    processes.enter_worker()
    stacks.write_on_signal()
    heartbeats.writer(1).beat()
    while True:
        time.sleep(100)


def test_the_stack_of_another_process_and_its_pulse() -> None:
    stacks, heartbeats = StackFile(), Heartbeats(2, processes.context())
    process = processes.start(stuck, stacks, heartbeats)
    try:
        deadline = time.monotonic() + 30
        while not heartbeats.num_beats(1) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.pid is not None
        for _ in range(2):  # the second does not hold what the first left
            stack = stacks.capture(process.pid)
            assert stack.count("in stuck") == 1
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        while not is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(process.pid)
    finally:
        processes.stop([process], 0.0)
        stacks.close()
