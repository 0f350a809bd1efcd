"""What a process died of, and whether it is alive at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

from freerun.core import EnvFailure, OutOfMemory, WorkerDied, WorkerHung

CGROUPS = Path("/sys/fs/cgroup")


class OutOfMemoryKills:
    """Counts those of our control groups and of the machine; a container may see only some of the counters."""

    def __init__(self, files: Iterable[Path] | None = None):
        self._files = list(_counters() if files is None else files)
        self._last = self._read()

    def new_kills(self) -> int:
        """Since the last call."""
        before, self._last = self._last, self._read()
        return max((count - before.get(path, count) for path, count in self._last.items()), default=0)

    def _read(self) -> dict[Path, int]:
        counts = {}
        for path in self._files:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            for name, *number in map(str.split, lines):
                if name == "oom_kill":
                    counts[path] = int(number[0])
        return counts


def _counters() -> Iterable[Path]:
    yield Path("/proc/vmstat")
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        number, controllers, path = group.split(":", 2)
        if number == "0":  # version 2
            yield CGROUPS / path.lstrip("/") / "memory.events"
            yield CGROUPS / "memory.events"
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            yield CGROUPS / "memory" / "memory.oom_control"


class Coroner:
    """Says what a process died of."""

    def __init__(self) -> None:
        self.at_work = threading.Lock()  # held while somebody finds out what hangs, and kills it
        self._memory = OutOfMemoryKills()
        self._hung: dict[int, WorkerHung] = {}

    def killed(self, pid: int, failure: WorkerHung) -> None:
        """By us, for this reason."""
        self._hung[pid] = failure

    def report(self, worker: int, pid: int | None, exit_code: int | None) -> EnvFailure:
        with self.at_work:
            hung = self._hung.pop(pid or -1, None)
        if hung is not None:
            return hung
        failure: EnvFailure
        if exit_code is None or exit_code >= 0:
            return WorkerDied(f"worker {worker} died with exit code {exit_code}")
        died = f"worker {worker} died of {_signal_name(-exit_code)}"
        if exit_code != -signal.SIGKILL:
            return WorkerDied(died)
        if self._memory.new_kills():
            failure = OutOfMemory(
                f"{died}: the kernel killed it for lack of memory; use fewer workers, or fewer environments in each"
            )
        else:
            failure = WorkerDied(f"{died}, which freerun did not send")
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
