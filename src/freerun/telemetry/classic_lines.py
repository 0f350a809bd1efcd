"""The lines that users of the original system know: progress while episodes are collected, then the update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rich.console import Console

from freerun.core import Counts
from freerun.telemetry.plain_text import format_or_dash, print_plain

POLL_SECONDS = 0.1
"""How often the counts are read for the lines of progress."""
LINES_PER_UPDATE = 10


class ClassicLines:
    """Prints a line for every tenth of an update's episodes, one when all have arrived, and one for the update."""

    def __init__(
        self,
        title: str,
        counts: Callable[[], Counts],
        episodes_per_update: int,
        console: Console,
        takes_turns: bool = False,
    ):
        """`takes_turns` is True for a mode that collects and learns in turns: its lines do not say "asynchronously"."""
        self._counts = counts
        self._num_wanted = episodes_per_update
        self._manner = "" if takes_turns else " asynchronously"
        self._console = console
        self._closing = threading.Event()
        # The learner's thread prints updates and begins the next round; the other thread prints progress in between.
        # The lock keeps a progress line of the old round from being counted, or printed, in the new one.
        self._lock = threading.Lock()
        print_plain(console, title)
        self._delivered_before = self._counts().episodes_delivered
        self._begin_round()
        self._thread = threading.Thread(target=self._watch, name="freerun-classic", daemon=True)
        self._thread.start()

    def _begin_round(self) -> None:
        self._began_at = time.perf_counter()
        self._num_shown = 0
        print_plain(self._console, f"Collecting {self._num_wanted} episodes{self._manner}...")

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            with self._lock:
                self._show_progress()

    def _show_progress(self) -> None:
        # Collecting runs ahead of learning, so more episodes than this update wants may have arrived.
        delivered = min(self._num_wanted, self._counts().episodes_delivered - self._delivered_before)
        seconds = max(1e-6, time.perf_counter() - self._began_at)  # never 0, because it divides
        every = max(1, self._num_wanted // LINES_PER_UPDATE)
        if delivered // every > self._num_shown // every:
            self._num_shown = delivered
            print_plain(self._console, f"  {delivered}/{self._num_wanted} episodes ({delivered / seconds:.1f} eps/sec)")
            if delivered == self._num_wanted:
                print_plain(
                    self._console,
                    f"Collected {delivered} episodes in {seconds:.1f}s ({delivered / seconds:.1f} eps/sec)",
                )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._show_progress()  # the line "Collected …" must come before the update, however quick that was
            print_plain(
                self._console,
                f"Update complete: update={metrics['update']:.0f} episodes={metrics['episodes']:.0f} steps={step} "
                f"mean_return={format_or_dash(metrics['return_mean'], '.2f')}",
            )
            if metrics["progress"] < 1:
                # What has arrived beyond this update, because collecting runs ahead, belongs to the next round.
                self._delivered_before += self._num_wanted
                self._begin_round()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
