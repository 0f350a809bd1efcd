"""Which processes hold environments, among all that this one has started, and a moment to do something to them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


def workers() -> set[int]:
    """Children of this process's fork server, which itself stays for the next run; of Ray's processes, the actors.

    A process of Ray that has once run a training keeps a fork server of its own, whose processes are not counted."""
    family = psutil.Process().children(recursive=True)
    found = set()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent is None:
                continue
            is_actor = parent.name() == "raylet" and "FreerunActor" in "".join(process.cmdline()[:1])
            if is_actor or (parent.ppid() == os.getpid() and parent.name() != "raylet"):
                found.add(process.pid)
    return found


def left_of(pids: set[int], seconds: float = 10.0) -> set[int]:
    """Those of the workers that have not ended after this time.

    Whoever waits for a worker hears of its end a moment before the fork server has removed the process."""
    deadline = time.monotonic() + seconds
    while (left := pids & workers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@contextlib.contextmanager
def after_updates(run_dir: Path, num_updates: int, act: Callable[[], object]) -> Iterator[None]:
    """Act from another thread, once a run has got so far."""

    def wait_and_act() -> None:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") >= num_updates:
                time.sleep(0.1)  # into the next round
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join()
