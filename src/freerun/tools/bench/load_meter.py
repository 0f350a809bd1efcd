"""Measures how much of the machine this program uses, and how much other programs use at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from freerun.version import VERSION

PR_SET_CHILD_SUBREAPER = 36
BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal")
"""The parts of a core's time that are not idle. `steal` is time that other virtual machines used."""


@dataclass(frozen=True)
class Load:
    """How busy the cores were with this program and with others, in percent of all cores."""

    own: float
    others: float


class LoadMeter:
    """Measures the load from its creation until it is read. Child processes count as this program."""

    def __init__(self) -> None:
        self._began, self._busy_before, self._own_before = time.perf_counter(), _busy_seconds(), own_seconds()

    def read(self) -> Load:
        core_seconds = (time.perf_counter() - self._began) * num_cores()
        own, busy = own_seconds() - self._own_before, _busy_seconds() - self._busy_before
        # The counters are read one after another, so a difference may come out slightly below zero.
        return Load(100 * max(0.0, own) / core_seconds, 100 * max(0.0, busy - own) / core_seconds)


def adopt_orphans() -> None:
    """Count processes whose parent has ended without waiting for them as this program, too, from now on.

    So ends the fork server of a training that this program has started, with the time of all its workers. Linux gives
    such orphans to the nearest ancestor that asked for them. Elsewhere they stay unknown, and count as others."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def num_cores() -> int:
    return os.cpu_count() or 1


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in BUSY_FIELDS)  # systems differ in which of them exist


def own_seconds() -> float:
    """Return the processor time that this process and its descendants have used."""
    return cpu_seconds(_own_processes())


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time that these processes have used; one that has ended counts as zero.

    What their children used counts as soon as those have ended and were waited for. So processes that live only for a
    moment are not missed, such as workers that a fork server starts and ends."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # a process that has just ended
            times = process.cpu_times()
            # Waiting for I/O is not counted: the core is free for others then.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def own_megabytes() -> float:
    """Return the memory of this process and its descendants. Linux counts shared memory once, others not at all."""
    total = 0.0
    for process in _own_processes():
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            # The proportional set size divides a shared page among those who share it; only Linux reports it.
            total += getattr(memory, "pss", memory.uss) / 1e6
    return total


def _own_processes() -> Iterator[psutil.Process]:
    own = psutil.Process()
    yield own
    yield from own.children(recursive=True)


def describe() -> dict[str, Any]:
    """Return the facts about this machine that a report names."""
    return {
        "cores": num_cores(),
        "processor": processor(),
        "memory_gigabytes": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "freerun": VERSION,
    }


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()  # not Linux
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
