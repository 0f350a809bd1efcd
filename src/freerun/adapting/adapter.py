"""`--adapt` in a run: a thread that looks at it, asks the tuner, and turns the dials.

Dials of a mode may be turned at any time. Those of an algorithm are turned by the learner itself, between two updates:
that is why the adapter is a sink, which is written to then.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from freerun.adapting.knobs import Knob
from freerun.adapting.rules import Circumstances
from freerun.adapting.tuner import Tuner, Turn
from freerun.adapting.windows import Sample, Update, Window
from freerun.core import Counts, Dial, Metrics
from freerun.transport.tracks import Tracks

logger = logging.getLogger("freerun")

FILE_NAME = "adapting.jsonl"
LOOK_SECONDS = 0.25
SETTLE_SECONDS = 1.0
"""After a change, at least; and longer than a unit takes, for what was begun before belongs to before."""
UNITS_TO_SETTLE = 1.5
MOST_SETTLE_SECONDS = 60.0
SAID = {"try": "try", "keep": "keep", "undo": "back to"}


class Adapter:
    """A gauge of the dials' values and a sink of the records; every change is told in log.txt and in adapting.jsonl."""

    def __init__(
        self,
        dials: Sequence[Dial],
        given: Circumstances,
        window_seconds: float,
        counts: Callable[[], Counts],
        tracks: Tracks,
        num_workers: int,
        cpu_percent: Callable[[], float],
        path: Path,
    ):
        """Workers have the first `num_workers` tracks, the learner has the next."""
        self._dials = {dial.name: dial for dial in dials}
        knobs = [Knob(dial.name, dial.read(), dial.low, dial.high, dial.is_whole) for dial in dials]
        self._tuner = Tuner(knobs, given)
        self._window_seconds = window_seconds
        self._counts = counts
        self._tracks = tracks
        self._num_workers = num_workers
        self._cpu_percent = cpu_percent
        self._file = path.open("a", encoding="utf-8")
        self._began = time.perf_counter()
        self._window = Window(window_seconds)
        self._settled_at: float | None = None
        self._turned_at = self._began
        self._restarts = counts().worker_restarts
        self._due: list[tuple[Dial, float]] = []  # for the learner to turn
        self._updates: list[Update] = []
        self._num_changes = 0
        self._last_gain = 0.0
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="freerun-adapter", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the learner's thread

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Right after an update, when nothing is half done."""
        if self._failure is not None:
            raise self._failure
        buffer_percent = metrics.get("buffer_percent")
        fill = None if buffer_percent is None else buffer_percent / 100
        with self._lock:
            self._updates.append(Update(time.perf_counter(), step, metrics.get("lag_mean", 0.0), fill))
            for dial, value in self._due:
                dial.turn(value)
            self._due.clear()

    def read(self, step: int) -> Metrics:
        values = {f"adapted_{name}": float(dial.read()) for name, dial in self._dials.items()}
        return {**values, "adapt_changes": float(self._num_changes), "adapt_last_gain": self._last_gain}

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._file.close()
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------ its own thread

    def _look_on(self) -> None:
        try:
            while not self._closing.wait(LOOK_SECONDS):
                self._look()
        except Exception as failure:  # raised in the learner's thread
            self._failure = failure

    def _look(self) -> None:
        with self._lock:
            updates, self._updates = self._updates, []
            is_settled = not self._due and all(dial.is_settled() for dial in self._dials.values())
        counts, now = self._counts(), time.perf_counter()
        if (harm := self._harm(now, counts)) is not None:
            for turn in self._tuner.abandon(harm):
                self._follow(turn)
            return
        if not is_settled or not counts.steps_delivered:
            self._settled_at = None
            return
        if self._settled_at is None:
            self._settled_at = now + _settle_seconds(counts)
            self._window = Window(self._window_seconds)
        if now < self._settled_at:
            return
        for update in updates:
            self._window.update(update)
        self._window.add(self._sample(now, counts))
        seen = self._window.close()
        if seen is None:
            return
        self._window = Window(self._window_seconds)
        for turn in self._tuner.observe(seen):
            self._follow(turn)

    def _harm(self, now: float, counts: Counts) -> str | None:
        """What speaks against the change that is being tried, whatever the speed."""
        num_failures, self._restarts = counts.worker_restarts - self._restarts, counts.worker_restarts
        if self._tuner.trial is None:
            return None
        if num_failures > 0:
            return f"{num_failures} worker failures since the change"
        if self._settled_at is None and now - self._turned_at > MOST_SETTLE_SECONDS:
            return f"the change has not come into force within {MOST_SETTLE_SECONDS:g} s"
        return None

    def _sample(self, now: float, counts: Counts) -> Sample:
        of_workers = [self._tracks.totals(worker) for worker in range(self._num_workers)]
        return Sample(
            now,
            counts.steps_delivered,
            counts.episodes_delivered,
            counts.steps_dropped,
            self._tracks.totals(self._num_workers),
            [sum(seconds) for seconds in zip(*of_workers, strict=True)],
            self._cpu_percent() / 100,
            counts.queue_fill,
        )

    def _follow(self, turn: Turn) -> None:
        self._tell(turn)
        if turn.kind == "keep":
            return
        dial = self._dials[turn.knob]
        if dial.between_updates:
            with self._lock:
                self._due.append((dial, turn.new))
        else:
            dial.turn(turn.new)
        self._settled_at, self._turned_at = None, time.perf_counter()

    def _tell(self, turn: Turn) -> None:
        effect = turn.effect
        self._num_changes += turn.kind != "keep"
        if effect is not None:
            self._last_gain = effect.gain
        measured = "" if effect is None else f" [{effect}]"
        values = f"{turn.old:g} → {turn.new:g}" if turn.kind == "try" else f"{turn.new:g}"
        logger.info("adapt: %s %s %s: %s%s", SAID[turn.kind], turn.knob, values, turn.reason, measured)
        line = {
            "at": round(time.perf_counter() - self._began, 2),
            **{name: getattr(turn, name) for name in ("kind", "knob", "old", "new", "reason")},
            **(
                {} if effect is None else {name: getattr(effect, name) for name in ("before", "after", "gain", "noise")}
            ),
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def _settle_seconds(counts: Counts) -> float:
    unit_seconds = counts.busy_seconds / counts.episodes_delivered if counts.episodes_delivered else 0.0
    return min(MOST_SETTLE_SECONDS, max(SETTLE_SECONDS, UNITS_TO_SETTLE * unit_seconds))
