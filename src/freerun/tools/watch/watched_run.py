"""Reads a run from its folder alone, while it runs, after its end or on another day."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import parse_json, read_json
from freerun.settings.registry import situation
from freerun.telemetry.advice import FIGURES, advise, mean_record
from freerun.telemetry.timeline import (
    MOST_LINE_BYTES,
    STATE_NAMES,
    TimelineGrid,
    TimelineRecord,
    read_timeline_header,
    read_timeline_record,
    spread_blocks,
)
from freerun.tools.watch.curves import Curves

CONFIG, SUMMARY = "config.json", "summary.json"
MOST_BYTES_AT_ONCE = 2_000_000
"""The number of bytes of a file that one request reads, so that the first page of a long run comes soon."""
MOST_RECENT = 10
"""The number of updates that the advice is about."""
MOST_INCIDENTS = 100
LOG_BYTES = 20_000
STALE_SECONDS = 30.0
"""A run without a summary that has written nothing for this long is taken for ended."""
WINDOW_SECONDS = 120.0
"""A part of a timeline up to this long is read from the file itself, at its full resolution."""
MOST_LINES_CACHED = 300
UNKNOWN_STATE = -1


class AppendedLines:
    """Reads the lines that are appended to a file. Each is returned once, when it is complete."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the text of each line since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(MOST_BYTES_AT_ONCE)
                while chunk and b"\n" not in chunk and (more := file.read(MOST_BYTES_AT_ONCE)):
                    chunk += more
                    if len(chunk) > MOST_LINE_BYTES:  # no run writes such a line
                        return
        except OSError:  # the file does not exist yet
            return
        complete = chunk[: chunk.rfind(b"\n") + 1]  # the last line may still be written
        for line in complete.splitlines(keepends=True):
            offset, self._offset = self._offset, self._offset + len(line)
            yield offset, line


class WatchedTimeline:
    """A coarse grid of the whole timeline, and the offsets of its lines to read a part at full resolution."""

    def __init__(self, path: Path):
        self._file = AppendedLines(path)
        self._grid: TimelineGrid | None = None
        self.tracks: list[str] = []
        self._offsets: list[tuple[float, int]] = []
        """The time at the end of each line, and where the line begins."""
        # A page that moves along the timeline asks for the same lines again and again.
        self._moment = functools.lru_cache(MOST_LINES_CACHED)(self._read_moment)
        self.figures: dict[str, float] = {}

    def read_new(self) -> None:
        """Add what was written since the last call."""
        moments: list[TimelineRecord] = []
        for offset, line in self._file.new_lines():
            try:
                if self._grid is None:
                    self.tracks = read_timeline_header(line).tracks
                    self._grid = TimelineGrid(len(self.tracks))
                    continue
                moment = read_timeline_record(line, len(self.tracks))
            except ValueError:  # a line that no run wrote
                continue
            moments.append(moment)
            self._offsets.append((moment.at, offset))
            self.figures = moment.figures or self.figures
        # One call for all moments is much faster when hours of a run are read for the first time.
        if moments and self._grid is not None:
            self._grid.add(TimelineRecord(moments[-1].at, {}, np.concatenate([moment.blocks for moment in moments])))

    @property
    def seconds(self) -> float:
        return 0.0 if self._grid is None else self._grid.seconds

    def cells(self, start: float, stop: float, num_cells: int) -> Array:
        """Return the share of each state in each cell of time, [track, cell, state]."""
        if self._grid is None:
            return np.zeros((0, num_cells, len(STATE_NAMES)), np.float32)
        width = (stop - start) / num_cells
        if stop - start > WINDOW_SECONDS:  # the file would take too long to read
            return self._grid.cells(start, stop, num_cells) / width
        # A line tells what ended by its time, so a block of this part may stand in a line up to two seconds later.
        first = np.searchsorted([at for at, _ in self._offsets], start)
        last = np.searchsorted([at for at, _ in self._offsets], stop + 2.0, side="right")
        moments = [self._moment(offset) for _, offset in self._offsets[first : last + 1]]
        blocks = [moment.blocks for moment in moments if len(moment.blocks)]
        if not blocks:
            return np.zeros((len(self.tracks), num_cells, len(STATE_NAMES)), np.float32)
        return spread_blocks(np.concatenate(blocks), len(self.tracks), start, width, num_cells) / width

    def _read_moment(self, offset: int) -> TimelineRecord:
        with self._file.path.open("rb") as file:
            file.seek(offset)
            return read_timeline_record(file.readline(), len(self.tracks))


class WatchedRun:
    """One run of the page. Callers hold `lock` while they use it, because requests come from several threads."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.began_at = began_at(path)
        self.curves = Curves()
        self.timeline = WatchedTimeline(path / "timeline.jsonl")
        self._metrics = AppendedLines(path / "metrics.jsonl")
        self._incidents_file = AppendedLines(path / "incidents.jsonl")
        self.incidents: list[dict[str, Any]] = []
        self.num_incidents = 0
        self._recent: list[dict[str, float | None]] = []

    def read_new(self) -> None:
        """Read what the run has written since the last call."""
        for _, line in self._metrics.new_lines():
            with contextlib.suppress(ValueError):  # a line that no run wrote
                self.curves.add_line(line)
                self._recent = [*self._recent[-MOST_RECENT + 1 :], self.curves.newest]
        for _, line in self._incidents_file.new_lines():
            with contextlib.suppress(ValueError, RecursionError):  # deeply nested JSON is no incident either
                self.incidents = [*self.incidents[-MOST_INCIDENTS + 1 :], parse_json(line)]
                self.num_incidents += 1
        self.timeline.read_new()

    # ------------------------------------------------------------------------------------------ what the page shows

    def headline(self) -> dict[str, Any]:
        """Return what the list of runs says about this one."""
        config, summary = read_or_empty(self.path / CONFIG), read_or_empty(self.path / SUMMARY)
        names = ("env", "algo", "mode", "seed", "num_workers")
        outcome = summary.get("outcome") or ("running" if self._is_alive() else "ended without a summary")
        return {**{name: config.get(name) for name in names}, "outcome": outcome, "began": began_at(self.path)}

    def _is_alive(self) -> bool:
        # Only the times of the files can tell: the run may be on another machine that shares the folder.
        newest = 0.0
        for name in (CONFIG, "metrics.jsonl", "timeline.jsonl"):
            path = self.path / name
            newest = max(newest, path.stat().st_mtime if path.is_file() else 0.0)
        return time.time() - newest < STALE_SECONDS

    def figures(self) -> list[dict[str, Any]]:
        """Return the newest key figures with their targets."""
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
        """Return all that the page shows about this run except curves and timeline."""
        config, summary = read_or_empty(self.path / CONFIG), read_or_empty(self.path / SUMMARY)
        return {
            **self.headline(),
            "progress": self.curves.newest.get("progress"),
            "step": self.curves.newest.get("step"),
            "updates": self.curves.newest.get("update"),
            "episodes": self.curves.newest.get("episodes"),
            "seconds": self.curves.newest.get("wall_seconds"),
            "figures": self.figures(),
            "advice": advise(mean_record(self._recent), situation(config)) if self._recent else None,
            "lags": sorted(self.curves.lag_steps.items()),
            "ledger": _ledger(summary, self.curves.newest),
            "num_incidents": self.num_incidents,
            "incidents": self.incidents[::-1],
            "config": config,
            "log": _tail(self.path / "log.txt"),
        }

    def cells(self, start: float, stop: float | None, num_cells: int) -> dict[str, Any]:
        """Return the most frequent state of each track in each cell of time, and its share in percent."""
        timeline = self.timeline
        # The page may ask for more time than there is; at least 10 ms are drawn.
        stop = timeline.seconds if stop is None else min(stop, max(timeline.seconds, start + 0.01))
        start = max(0.0, min(start, stop - 0.01))
        shares = timeline.cells(start, max(stop, start + 0.01), num_cells)
        is_known = shares > 1e-3
        return {
            "tracks": timeline.tracks,
            "states": STATE_NAMES,
            "start": start,
            "stop": stop,
            "seconds": timeline.seconds,
            "top": np.where(is_known.any(axis=2), shares.argmax(axis=2), UNKNOWN_STATE).tolist(),
            "percent": np.round(100 * shares.max(axis=2) / np.maximum(shares.sum(axis=2), 1e-6)).astype(int).tolist(),
        }


def began_at(path: Path) -> float:
    """Return when the run in this folder began, in seconds since 1970. Another run has another time."""
    try:
        return (path / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def _ledger(summary: dict[str, Any], newest: dict[str, float | None]) -> dict[str, Any]:
    """Return what became of the episodes: all counts after the end of a run, the main ones before."""
    if ledger := summary.get("ledger"):
        return {name: value for name, value in ledger.items() if not isinstance(value, dict)}
    return {name: newest.get(name) for name in ("episodes", "dropped_steps", "worker_restarts") if name in newest}


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict where it is missing or broken."""
    try:
        return read_json(path)
    except UserError:
        return {}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # Only the end of the log, which may be very long.
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
