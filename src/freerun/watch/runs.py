"""What is known of a run from its folder alone: while it goes on, after its end, on another day."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import parse_json, read_json
from freerun.telemetry.figures import FIGURES, advise, mean_record
from freerun.telemetry.timeline import MOST_LINE_BYTES, STATE_NAMES, Grid, Moment, read_head, read_moment, spread
from freerun.watch.curves import Curves

CONFIG, SUMMARY = "config.json", "summary.json"
MOST_BYTES_AT_ONCE = 2_000_000
"""Of a file, at one look: a page need not wait until hours of a run were read."""
MOST_RECENT = 10
MOST_INCIDENTS = 100
LOG_BYTES = 20_000
STALE_SECONDS = 30.0
"""A run without a summary that has written nothing for so long is not under way any more."""
WINDOW_SECONDS = 120.0
"""A part of a timeline up to this long is drawn from the file itself, with all that it says."""
LINES_CACHED = 300
NOTHING = -1


class Growing:
    """Lines of a file that is being written; each is given once, when it is whole."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """With the place where each begins."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(MOST_BYTES_AT_ONCE)
                while chunk and b"\n" not in chunk and (more := file.read(MOST_BYTES_AT_ONCE)):
                    chunk += more
                    if len(chunk) > MOST_LINE_BYTES:  # no run wrote that
                        return
        except OSError:
            return
        whole = chunk[: chunk.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            place, self._offset = self._offset, self._offset + len(line)
            yield place, line


class WatchedTimeline:
    """A coarse picture of all of it, and the places of its lines, to look at a part more closely."""

    def __init__(self, path: Path):
        self._file = Growing(path)
        self._grid: Grid | None = None
        self.tracks: list[str] = []
        self._places: list[tuple[float, int]] = []  # until when, where the line begins
        self._cache: OrderedDict[int, Moment] = OrderedDict()
        self.figures: dict[str, float] = {}

    def look(self) -> None:
        moments: list[Moment] = []
        for place, line in self._file.new_lines():
            try:
                if self._grid is None:
                    self.tracks = read_head(line).tracks
                    self._grid = Grid(len(self.tracks))
                    continue
                moment = read_moment(line, len(self.tracks))
            except ValueError:  # no run wrote that
                continue
            moments.append(moment)
            self._places.append((moment.at, place))
            self.figures = moment.figures or self.figures
        if moments and self._grid is not None:  # at once: hours of a run may have to be caught up with
            self._grid.add(Moment(moments[-1].at, {}, np.concatenate([moment.blocks for moment in moments])))

    @property
    def seconds(self) -> float:
        return 0.0 if self._grid is None else self._grid.seconds

    def cells(self, start: float, stop: float, num_cells: int) -> Array:
        """[track, cell, state], as shares of each cell."""
        if self._grid is None:
            return np.zeros((0, num_cells, len(STATE_NAMES)), np.float32)
        width = (stop - start) / num_cells
        if stop - start > WINDOW_SECONDS:
            return self._grid.cells(start, stop, num_cells) / width
        # What is told in a line may have begun long before it; a second and a half is the usual.
        first = np.searchsorted([at for at, _ in self._places], start)
        last = np.searchsorted([at for at, _ in self._places], stop + 2.0, side="right")
        moments = [self._moment(place) for _, place in self._places[first : last + 1]]
        blocks = [moment.blocks for moment in moments if len(moment.blocks)]
        if not blocks:
            return np.zeros((len(self.tracks), num_cells, len(STATE_NAMES)), np.float32)
        return spread(np.concatenate(blocks), len(self.tracks), start, width, num_cells) / width

    def _moment(self, place: int) -> Moment:
        if place in self._cache:
            self._cache.move_to_end(place)
            return self._cache[place]
        with self._file.path.open("rb") as file:
            file.seek(place)
            moment = self._cache[place] = read_moment(file.readline(), len(self.tracks))
        if len(self._cache) > LINES_CACHED:
            self._cache.popitem(last=False)
        return moment


class WatchedRun:
    """Reads what is new when it is asked. One look at a time: requests may come together."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.born = born(path)
        self.curves = Curves()
        self.timeline = WatchedTimeline(path / "timeline.jsonl")
        self._metrics = Growing(path / "metrics.jsonl")
        self._incidents_file = Growing(path / "incidents.jsonl")
        self.incidents: list[dict[str, Any]] = []
        self.num_incidents = 0
        self._recent: list[dict[str, float | None]] = []

    def look(self) -> None:
        for _, line in self._metrics.new_lines():
            with contextlib.suppress(ValueError):  # a line that no run wrote
                self.curves.add_line(line)
                self._recent = [*self._recent[-MOST_RECENT + 1 :], self.curves.newest]
        for _, line in self._incidents_file.new_lines():
            with contextlib.suppress(ValueError, RecursionError):
                self.incidents = [*self.incidents[-MOST_INCIDENTS + 1 :], parse_json(line)]
                self.num_incidents += 1
        self.timeline.look()

    # ------------------------------------------------------------------------------------------ what the page shows

    def head(self) -> dict[str, Any]:
        """Enough to choose it by."""
        config, summary = read_or_empty(self.path / CONFIG), read_or_empty(self.path / SUMMARY)
        names = ("env", "algo", "mode", "seed", "num_workers")
        outcome = summary.get("outcome") or ("running" if self._is_alive() else "ended without a word")
        return {**{name: config.get(name) for name in names}, "outcome": outcome}

    def _is_alive(self) -> bool:
        newest = 0.0
        for name in (CONFIG, "metrics.jsonl", "timeline.jsonl"):
            path = self.path / name
            newest = max(newest, path.stat().st_mtime if path.is_file() else 0.0)
        return time.time() - newest < STALE_SECONDS

    def figures(self) -> list[dict[str, Any]]:
        newest = {**self.curves.newest, **self.timeline.figures}
        return [
            {
                "name": name,
                "label": figure.label,
                "value": newest[name],
                "percent": figure.is_percent,
                "target": figure.target,
                "low": figure.low,
                "high": figure.high,
            }
            for name, figure in FIGURES.items()
            if newest.get(name) is not None
        ]

    def overview(self) -> dict[str, Any]:
        summary = read_or_empty(self.path / SUMMARY)
        return {
            **self.head(),
            "progress": self.curves.newest.get("progress"),
            "step": self.curves.newest.get("step"),
            "updates": self.curves.newest.get("update"),
            "episodes": self.curves.newest.get("episodes"),
            "seconds": self.curves.newest.get("wall_seconds"),
            "figures": self.figures(),
            "advice": advise(mean_record(self._recent)) if self._recent else None,
            "lags": sorted(self.curves.lag_steps.items()),
            "ledger": _ledger(summary, self.curves.newest),
            "num_incidents": self.num_incidents,
            "incidents": self.incidents[::-1],
            "config": read_or_empty(self.path / CONFIG),
            "log": _tail(self.path / "log.txt"),
        }

    def cells(self, start: float, stop: float | None, num_cells: int) -> dict[str, Any]:
        """What each did most in every part of the time, and how much of it."""
        timeline = self.timeline
        stop = timeline.seconds if stop is None else min(stop, max(timeline.seconds, start + 0.01))
        start = max(0.0, min(start, stop - 0.01))
        shares = timeline.cells(start, max(stop, start + 0.01), num_cells)
        known = shares > 1e-3
        return {
            "tracks": timeline.tracks,
            "states": STATE_NAMES,
            "start": start,
            "stop": stop,
            "seconds": timeline.seconds,
            "top": np.where(known.any(axis=2), shares.argmax(axis=2), NOTHING).tolist(),
            "percent": np.round(100 * shares.max(axis=2) / np.maximum(shares.sum(axis=2), 1e-6)).astype(int).tolist(),
        }


def born(path: Path) -> float:
    """When the run in a folder was begun: another one may take its place."""
    try:
        return (path / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def _ledger(summary: dict[str, Any], newest: dict[str, float | None]) -> dict[str, Any]:
    """Episodes by what became of them: the whole account at the end, the outline before."""
    if ledger := summary.get("ledger"):
        return {name: value for name, value in ledger.items() if not isinstance(value, dict)}
    return {name: newest.get(name) for name in ("episodes", "dropped_steps", "worker_restarts") if name in newest}


def read_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
