"""What a process died of, and whether it is alive at all."""

from __future__ import annotations

import signal
import threading
from typing import TypeVar

import psutil

from freerun.core import EnvFailure, OutOfMemory, WorkerDied, WorkerHung
from freerun.transport.memory_kills import OutOfMemoryKills

Failure = TypeVar("Failure", bound=EnvFailure)

FEWER = "use fewer workers, or fewer environments in each"


class Coroner:
    """Says what a process died of."""

    def __init__(self) -> None:
        self.at_work = threading.Lock()  # held while somebody finds out what hangs, and kills it
        self._memory = OutOfMemoryKills()
        self._hung: dict[int, WorkerHung] = {}

    def look(self) -> None:
        """Now and then: so that it is known when something happened."""
        self._memory.look()

    def killed(self, pid: int, failure: WorkerHung) -> None:
        """By us, for this reason."""
        self._hung[pid] = failure

    def report(self, worker: int, pid: int | None, exit_code: int | None) -> EnvFailure:
        with self.at_work:
            hung = self._hung.pop(pid or -1, None)
        if hung is not None:
            return hung
        if exit_code is None or exit_code >= 0:
            return WorkerDied(f"worker {worker} died with exit code {exit_code}")
        died = f"worker {worker} died of {_signal_name(-exit_code)}"
        if exit_code != -signal.SIGKILL:
            return WorkerDied(died)
        failure = lack_of_memory(died, self._memory)
        return failure or _from_outside(WorkerDied(f"{died}, which freerun did not send"))


def lack_of_memory(died: str, memory: OutOfMemoryKills) -> OutOfMemory | None:
    """What to say of a process that was killed, and not by us, if it was for lack of memory."""
    verdict = memory.claim()
    if verdict == "certain":
        return _from_outside(OutOfMemory(f"{died}: the kernel killed it for lack of memory; {FEWER}"))
    if verdict == "likely":
        hint = "probably for lack of memory, for which the kernel killed something on this machine at that time"
        return _from_outside(OutOfMemory(f"{died}, {hint}; {FEWER}"))
    return None


def _from_outside(failure: Failure) -> Failure:
    failure.from_outside = True
    return failure


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_stopped(pid: int) -> bool:
    """By a signal, as an operator would."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
