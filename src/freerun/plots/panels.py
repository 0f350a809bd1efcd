"""What is drawn, apart from how: panels with lines and bands, or with rows of colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import read_json
from freerun.telemetry.timeline import STATE_NAMES, Recording

STATE_COLORS = {
    "busy": (30, 132, 84),
    "waiting-for-slot": (248, 205, 150),
    "waiting-for-weights": (176, 203, 247),
    "waiting-for-data": (219, 224, 232),
    "waiting-for-others": (224, 203, 238),
    "restarting": (216, 57, 79),
    "parked": (245, 245, 245),
}
"""What waits is pale: a picture should show at a glance where work was done."""
LINE_COLORS = ("#2f6fde", "#d9822b", "#1a9a6c", "#b24cc4", "#c23b4e", "#8a7a12")
TIMELINE_CELLS = 600


@dataclass(frozen=True)
class Line:
    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    """A band around it."""


@dataclass(frozen=True)
class Rows:
    """A coloured row per track, [row, cell, 3], over so many seconds."""

    names: list[str]
    colors: Array
    seconds: float


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    rows: Rows | None = None


def timelines(run_dirs: Sequence[Path]) -> list[Panel]:
    """One beside another, over the same time: as long as the shortest, so that they can be compared."""
    recordings = [(path, Recording.of(path)) for path in run_dirs]
    for path, recording in recordings:
        if recording is None:
            raise UserError(f"{path} has no timeline.jsonl: name a folder made by freerun train")
    known = [(path, recording, recording.grid()) for path, recording in recordings if recording is not None]
    seconds = min(grid.seconds for _, _, grid in known)
    panels = []
    for path, recording, grid in known:
        order = sorted(range(len(recording.tracks)), key=lambda track: recording.tracks[track].startswith("worker"))
        cells = grid.cells(0.0, seconds, TIMELINE_CELLS)[order]
        workers = [row for row, track in enumerate(order) if recording.tracks[track].startswith("worker")]
        busy = cells[workers, :, 0].sum() / max(cells[workers].sum(), 1e-9)
        title = f"{read_json(path / 'config.json').get('mode', path.name)}: workers {busy:.0%} busy"
        names = [recording.tracks[track] for track in order]
        panels.append(Panel(title, "seconds", "", rows=Rows(names, _mixed(cells), seconds)))
    return panels


def _mixed(cells: Array) -> Array:
    """The colours of the states, each by its share; white where nothing is known."""
    palette = np.array([STATE_COLORS[name] for name in STATE_NAMES])
    whole = cells.sum(axis=2, keepdims=True)
    shares = cells / np.maximum(whole, 1e-9)
    return np.where(whole > 0, shares @ palette, 255.0).round().astype(np.uint8)


def scaling(run_dirs: Sequence[Path]) -> list[Panel]:
    """Steps per second by the number of workers, a line per mode: the mean where there are several runs."""
    points: dict[str, dict[int, list[float]]] = {}
    for path in run_dirs:
        summary = read_json(path / "summary.json")
        try:
            num_workers, rate = int(summary["num_workers"]), float(summary["steps_per_second"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(
                f"{path / 'summary.json'} does not say how fast the run was with how many workers"
            ) from None
        points.setdefault(str(summary.get("mode")), {}).setdefault(num_workers, []).append(rate)
    lines = []
    for mode, rates in sorted(points.items()):
        workers = sorted(rates)
        means, lows, highs = (
            np.array([pick(rates[num]) for num in workers]) for pick in (lambda some: sum(some) / len(some), min, max)
        )
        lines.append(Line(mode, np.array(workers), means, lows, highs))
    return [Panel("Scaling", "workers", "steps per second", lines)]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Runs, and those in folders of runs."""
    found = []
    for path in paths:
        inside = (
            [path] if (path / "config.json").is_file() else sorted(each.parent for each in path.glob("*/config.json"))
        )
        if not inside:
            raise UserError(f"{path} holds no run: name a folder made by freerun train, or one that holds several")
        for run_dir in inside:
            if not {"env", "mode"} <= read_json(run_dir / "config.json").keys():
                raise UserError(f"{run_dir / 'config.json'} is none of a run: name a folder made by freerun train")
        found += inside
    return found
