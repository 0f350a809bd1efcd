"""Says what a run is waiting for when no update has come for a few seconds, so that no run is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rich.console import Console

from freerun.core import Counts, Demand
from freerun.telemetry.plain_text import print_plain
from freerun.telemetry.time_shares import LearnerActivity

SILENT_SECONDS = 5.0
"""After this long without an update, a display says what the learner is doing."""
REPEAT_SECONDS = 30.0
"""Plain lines repeat it this often, with the counts of that moment."""
POLL_SECONDS = 0.5


class WaitingStatus:
    """What the learner is doing, in words, and how long there has been no update. Any thread may ask."""

    def __init__(
        self,
        activity: Callable[[], LearnerActivity],
        counts: Callable[[], Counts] | None,
        remedy: Callable[[Demand], str | None],
    ):
        """`counts` is None if they are not up to date at any moment, as with several learners. `remedy` says what to do
        about a demand that waits for episodes to end; it gives None for a demand that does not wait for that."""
        self._activity = activity
        self._counts = counts
        self._remedy = remedy
        self._last_update = time.monotonic()  # one float, replaced as a whole: threads may read it without a lock

    def note_update(self) -> None:
        """Note that an update has been made just now."""
        self._last_update = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time since the last update."""
        return time.monotonic() - self._last_update

    @property
    def doing(self) -> str:
        """The learner's activity in a word or two."""
        return self._activity().doing

    def text(self) -> str:
        """Return the learner's activity with the counts of this moment."""
        activity = self._activity()
        counts = None if self._counts is None else self._counts()
        remedy = None if activity.demand is None else self._remedy(activity.demand)
        return describe(activity, counts, remedy)

    def sentence(self) -> str:
        return f"No update for {self.seconds:.0f} s: {self.text()}"


def describe(activity: LearnerActivity, counts: Counts | None, remedy: str | None) -> str:
    """Say what the learner is doing. If it waits for data: how much has arrived, and why there is no more."""
    demand = activity.demand
    if not demand:
        return activity.doing
    wanted, unit = (demand.steps, "steps") if demand.steps else (demand.episodes, "episodes")
    if counts is None:
        return f"waiting for {wanted:,} {unit}"
    num_ended = counts.episodes_delivered - activity.episodes
    arrived = max(0, counts.steps_delivered - activity.steps if demand.steps else num_ended)
    reason = _reason(counts, num_ended, arrived >= wanted, remedy)
    return f"{arrived:,} of {wanted:,} {unit} handed over{reason}"


def _reason(counts: Counts, num_ended: int, is_enough: bool, remedy: str | None) -> str:
    if counts.step_calls == 0:
        return ": no environment has made a step yet"
    if remedy is None:  # steps are handed over while their episodes go on, so no episode has to end
        return ""
    so_far = "" if counts.step_calls is None else f" ({counts.step_calls:,} calls of step and reset so far)"
    if num_ended <= 0:
        since = "since the last update" if counts.episodes_delivered > 0 else "yet"
        return f": no episode has ended {since}{so_far}; {remedy}"
    # Episodes are handed over in the order of their numbers, so that short ones are not favoured. So more than enough
    # may have arrived while the learner still waits for one long episode.
    if is_enough:
        return f": an episode that began before others has not ended{so_far}; {remedy}"
    return so_far


class WaitingLines:
    """A sink that prints what a run is waiting for, beside a display that prints only after updates."""

    def __init__(self, waiting: WaitingStatus, console: Console):
        self._waiting = waiting
        self._console = console
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="freerun-waiting", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._waiting.note_update()

    def _watch(self) -> None:
        last_said, last_line_at = "", time.monotonic()
        while not self._closing.wait(POLL_SECONDS):
            doing = self._waiting.doing
            # A new activity, such as an update after a long wait, is printed sooner than one that was printed before.
            pause = REPEAT_SECONDS if doing == last_said else SILENT_SECONDS
            if self._waiting.seconds < SILENT_SECONDS:
                last_said = ""
            elif time.monotonic() - last_line_at >= pause:
                last_said, last_line_at = doing, time.monotonic()
                print_plain(self._console, self._waiting.sentence())

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
