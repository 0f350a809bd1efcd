"""The lines that users of the original system know: episodes as they are collected, then the update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rich.console import Console

from freerun.core import Counts

POLL_SECONDS = 0.1
PARTS_OF_A_ROUND = 10


class ClassicLines:
    """A line for every tenth of an update's episodes, one when they are all there, and one for the update."""

    def __init__(self, title: str, counts: Callable[[], Counts], episodes_per_update: int, console: Console):
        self._counts = counts
        self._wanted = episodes_per_update
        self._console = console
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the learner writes, a thread watches
        self._print(title)
        self._begin()
        self._thread = threading.Thread(target=self._watch, name="freerun-classic", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._before = self._counts().episodes_delivered
        self._shown = 0
        self._print(f"Collecting {self._wanted} episodes asynchronously...")

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            with self._lock:
                self._show()

    def _show(self) -> None:
        delivered = min(self._wanted, self._counts().episodes_delivered - self._before)
        seconds = max(1e-6, time.perf_counter() - self._began)
        part = max(1, self._wanted // PARTS_OF_A_ROUND)
        if delivered // part > self._shown // part:
            self._shown = delivered
            self._print(f"  {delivered}/{self._wanted} episodes ({delivered / seconds:.1f} eps/sec)")
            if delivered == self._wanted:
                self._print(f"Collected {delivered} episodes in {seconds:.1f}s ({delivered / seconds:.1f} eps/sec)")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._show()
            self._print(
                f"Update complete: update={metrics['update']:.0f} episodes={metrics['episodes']:.0f} steps={step} "
                f"mean_return={metrics['return_mean']:.2f}"
            )
            if metrics["progress"] < 1:
                self._begin()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
