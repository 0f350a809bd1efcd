"""Finds out why a process died, and whether a process is alive at all."""

from __future__ import annotations

import signal
import threading
from typing import TypeVar

import psutil

from freerun.core import EnvFailure, OutOfMemory, WorkerDied, WorkerHung
from freerun.transport.memory_kills import OutOfMemoryKills

Failure = TypeVar("Failure", bound=EnvFailure)

FEWER = "use fewer workers, or fewer environments in each"


class ExitDiagnosis:
    """Turns the exit code of a worker into an error that names the cause."""

    def __init__(self, memory_kills: OutOfMemoryKills | None = None) -> None:
        # The hang detector holds this lock from the moment it decides to kill a worker until it has killed it. Without
        # the lock, the learner could see the death before the reason is noted, and would report a kill from outside.
        self.kill_lock = threading.Lock()
        self._memory_kills = memory_kills or OutOfMemoryKills()
        self._hung: dict[int, WorkerHung] = {}

    def refresh(self) -> None:
        """Read the kernel's counters. Call this regularly, so that a kill can be dated."""
        self._memory_kills.refresh()

    def record_kill(self, pid: int, failure: WorkerHung) -> None:
        """Note why freerun is about to kill this process. The caller holds `kill_lock`."""
        self._hung[pid] = failure

    def diagnose(self, worker: int, pid: int | None, exit_code: int | None) -> EnvFailure:
        """The error that describes how this worker ended."""
        with self.kill_lock:  # waits for a hang detector that is just ending this worker
            hung = self._hung.pop(pid or -1, None)
        if hung is not None:
            return hung
        # multiprocessing reports a process that died of signal N with exit code -N.
        if exit_code is None or exit_code >= 0:
            return WorkerDied(f"worker {worker} died with exit code {exit_code}")
        died = f"worker {worker} died of {_signal_name(-exit_code)}"
        if exit_code != -signal.SIGKILL:
            return WorkerDied(died)
        failure = out_of_memory_failure(died, self._memory_kills)
        return failure or _mark_from_outside(WorkerDied(f"{died}, which freerun did not send"))


def out_of_memory_failure(died: str, memory_kills: OutOfMemoryKills) -> OutOfMemory | None:
    """The error for a process that died of SIGKILL, if the kernel killed it for lack of memory; else None."""
    verdict = memory_kills.claim()
    if verdict == "certain":
        return _mark_from_outside(OutOfMemory(f"{died}: the kernel killed it for lack of memory; {FEWER}"))
    if verdict == "likely":
        hint = "probably for lack of memory, for which the kernel killed something on this machine at that time"
        return _mark_from_outside(OutOfMemory(f"{died}, {hint}; {FEWER}"))
    return None


def _mark_from_outside(failure: Failure) -> Failure:
    failure.from_outside = True
    return failure


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_alive(pid: int) -> bool:
    """True if the process runs or can run again. A zombie, whose exit code nobody has read, counts as dead."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """True if a signal such as SIGSTOP has stopped the process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
