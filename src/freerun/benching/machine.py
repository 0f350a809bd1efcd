"""What a measurement takes from the machine, and what others take from it meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from freerun.version import VERSION

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Parts of a core's time that are not idle; `steal` is what other virtual machines took."""


@dataclass(frozen=True)
class Load:
    """Shares of all cores, in percent."""

    own: float
    others: float


class LoadMeter:
    """From when it is made until it is read: this process and its descendants, and everybody else."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), own_seconds()

    def read(self) -> Load:
        seconds = (time.perf_counter() - self._began) * num_cores()
        own, busy = own_seconds() - self._own, _busy_seconds() - self._busy
        return Load(100 * max(0.0, own) / seconds, 100 * max(0.0, busy - own) / seconds)


def num_cores() -> int:
    return os.cpu_count() or 1


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in BUSY)


def own_seconds() -> float:
    """Processor time of this process and its descendants."""
    total = 0.0
    for process in family():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def own_megabytes() -> float:
    """Memory of this process and its descendants; what several share counts once, where the system tells."""
    total = 0.0
    for process in family():
        with contextlib.suppress(psutil.Error):
            found = process.memory_full_info()
            total += getattr(found, "pss", found.uss) / 1e6
    return total


def family() -> Iterator[psutil.Process]:
    own = psutil.Process()
    yield own
    yield from own.children(recursive=True)


def describe() -> dict[str, Any]:
    return {
        "cores": num_cores(),
        "processor": processor(),
        "memory_gigabytes": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "freerun": VERSION,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
