"""`--adapt` in a run: a thread that watches the run, asks the tuner, and applies its changes.

A mode's tunables may change at any time. Those of an algorithm are changed by the learner itself, between two updates:
that is why `LiveTuner` is a metric sink, which the learner calls after every update.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from freerun.core import Counts, Metrics, Tunable
from freerun.transport.state_tracks import SharedTracks
from freerun.tuning.rules import Circumstances
from freerun.tuning.tuner import Change, Tuner
from freerun.tuning.windows import RunSample, UpdateSample, Window

logger = logging.getLogger("freerun")

FILE_NAME = "adapting.jsonl"
LOOK_SECONDS = 0.25
SETTLE_SECONDS = 1.0
"""The shortest wait after a change. It is longer where units take longer, because a unit that was begun before the
change belongs to the time before it."""
UNITS_TO_SETTLE = 1.5
MAX_SETTLE_SECONDS = 60.0
VERBS = {"try": "try", "keep": "keep", "undo": "back to"}


class LiveTuner:
    """A gauge of the tunables' values and a sink of the metrics. Every change goes to log.txt and adapting.jsonl."""

    def __init__(
        self,
        tunables: Sequence[Tunable],
        circumstances: Circumstances,
        window_seconds: float,
        counts: Callable[[], Counts],
        tracks: SharedTracks,
        num_workers: int,
        cpu_percent: Callable[[], float],
        path: Path,
    ):
        """Workers have the first `num_workers` tracks, the learner has the next."""
        self._tunables = {tunable.name: tunable for tunable in tunables}
        self._tuner = Tuner(tunables, circumstances)
        self._window_seconds = window_seconds
        self._counts = counts
        self._tracks = tracks
        self._num_workers = num_workers
        self._cpu_percent = cpu_percent
        self._file = path.open("a", encoding="utf-8")
        self._began = time.perf_counter()
        self._window = Window(window_seconds)
        self._settled_at: float | None = None  # None while a change is not yet in force
        self._changed_at = self._began
        self._num_restarts = counts().worker_restarts
        self._num_changes = 0
        self._last_gain = 0.0
        # Two threads share the following: the learner's and this one's. The lock is never held while either waits.
        self._lock = threading.Lock()
        self._pending: list[tuple[Tunable, float]] = []  # for the learner to apply
        self._updates: list[UpdateSample] = []
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freerun-adapter", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the learner's thread

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Apply pending changes. The learner calls this right after an update, when nothing is half done."""
        if self._failure is not None:
            raise self._failure
        buffer_percent = metrics.get("buffer_percent")
        fill = None if buffer_percent is None else buffer_percent / 100
        with self._lock:
            self._updates.append(UpdateSample(time.perf_counter(), step, metrics.get("lag_mean", 0.0), fill))
            for tunable, value in self._pending:
                tunable.apply(value)
            self._pending.clear()

    def read(self, step: int) -> Metrics:
        values = {f"adapted_{name}": float(tunable.read()) for name, tunable in self._tunables.items()}
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

    def _run(self) -> None:
        try:
            while not self._closing.wait(LOOK_SECONDS):
                self._look()
        except Exception as failure:  # `write` and `close` raise it in the learner's thread
            self._failure = failure  # one store, after which this thread does nothing more: no lock is needed

    def _look(self) -> None:
        """Take a sample of the run; when a window is complete, let the tuner decide."""
        with self._lock:
            updates, self._updates = self._updates, []
            is_settled = not self._pending and all(tunable.is_settled() for tunable in self._tunables.values())
        counts, now = self._counts(), time.perf_counter()
        if (harm := self._harm(now, counts)) is not None:
            self._apply(self._tuner.abandon(harm))
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
        self._apply(self._tuner.observe(seen))

    def _harm(self, now: float, counts: Counts) -> str | None:
        """The reason to undo the change that is being tried, whatever the speed; None where there is none."""
        num_failures, self._num_restarts = counts.worker_restarts - self._num_restarts, counts.worker_restarts
        if self._tuner.trial is None:
            return None
        if num_failures > 0:
            return f"{num_failures} worker failures since the change"
        if self._settled_at is None and now - self._changed_at > MAX_SETTLE_SECONDS:
            return f"the change has not come into force within {MAX_SETTLE_SECONDS:g} s"
        return None

    def _sample(self, now: float, counts: Counts) -> RunSample:
        worker_seconds = [self._tracks.totals(worker) for worker in range(self._num_workers)]
        return RunSample(
            now,
            counts.steps_delivered,
            counts.episodes_delivered,
            counts.steps_dropped,
            self._tracks.totals(self._num_workers),
            [sum(seconds) for seconds in zip(*worker_seconds, strict=True)],
            self._cpu_percent() / 100,
            counts.queue_fill,
        )

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._report(change)
            if change.kind == "keep":
                continue
            tunable = self._tunables[change.name]
            if tunable.between_updates:
                with self._lock:
                    self._pending.append((tunable, change.new))
            else:
                tunable.apply(change.new)
            self._settled_at, self._changed_at = None, time.perf_counter()

    def _report(self, change: Change) -> None:
        effect = change.effect
        self._num_changes += change.kind != "keep"
        if effect is not None:
            self._last_gain = effect.gain
        measured = "" if effect is None else f" [{effect}]"
        values = f"{change.old:g} → {change.new:g}" if change.kind == "try" else f"{change.new:g}"
        logger.info("adapt: %s %s %s: %s%s", VERBS[change.kind], change.name, values, change.reason, measured)
        line: dict[str, float | str] = {
            "at": round(time.perf_counter() - self._began, 2),
            "kind": change.kind,
            "knob": change.name,
            "old": change.old,
            "new": change.new,
            "reason": change.reason,
        }
        if effect is not None:
            line |= {"before": effect.before, "after": effect.after, "gain": effect.gain, "noise": effect.noise}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def _settle_seconds(counts: Counts) -> float:
    """How long to wait until units that were begun before a change have arrived."""
    unit_seconds = counts.busy_seconds / counts.episodes_delivered if counts.episodes_delivered else 0.0
    return min(MAX_SETTLE_SECONDS, max(SETTLE_SECONDS, UNITS_TO_SETTLE * unit_seconds))
