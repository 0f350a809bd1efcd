"""Timelines as pictures: a row of coloured cells for the learner, each of its stages and each worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import read_json
from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline, TimelineGrid
from freerun.tools.plots.panels import Panel, PlotRows, read_each

STATE_COLORS = {
    "busy": (46, 158, 107, 1.0),
    "waiting-for-slot": (224, 135, 43, 0.45),
    "waiting-for-weights": (75, 130, 224, 0.45),
    "waiting-for-data": (140, 153, 173, 0.35),
    "waiting-for-others": (165, 102, 201, 0.45),
    "restarting": (216, 57, 79, 1.0),
    "parked": (140, 153, 173, 0.1),
}
"""Red, green, blue and opacity. Waiting is pale on light and on dark pages, so that work stands out at a glance."""
PANEL_CELLS = 600
PICTURE_CELLS = 480
PICTURE_CELL_SECONDS = 0.01


def timelines(run_dirs: Sequence[Path]) -> list[Panel]:
    """Draw runs side by side over the same time, which is that of the shortest, so that they can be compared."""
    known = read_each(run_dirs, _recorded)
    seconds = min(grid.seconds for _, grid in known.values())
    panels = []
    for path, (recording, grid) in known.items():
        order = _learner_first(recording.tracks)
        cells = grid.cells(0.0, seconds, PANEL_CELLS)[order]
        names = [recording.tracks[track] for track in order]
        workers = [row for row, name in enumerate(names) if name.startswith("worker")]
        # State 0 is `busy`: the share of the workers' recorded time that they spent in it.
        busy = cells[workers, :, 0].sum() / max(cells[workers].sum(), 1e-9)
        title = f"{read_json(path / 'config.json').get('mode', path.name)}: workers {busy:.0%} busy"
        panels.append(Panel(title, "seconds", "", rows=PlotRows(names, mix_states(cells), seconds)))
    return panels


def _recorded(path: Path) -> tuple[RecordedTimeline, TimelineGrid]:
    recording = RecordedTimeline.of(path)
    if recording is None:
        raise UserError(f"{path} has no timeline.jsonl: name a folder made by freerun train")
    return recording, recording.grid()


def _learner_first(tracks: Sequence[str]) -> list[int]:
    """Return the tracks in the order of their rows: the learner and its stages above the workers."""
    return sorted(range(len(tracks)), key=lambda track: tracks[track].startswith("worker"))


def mix_states(cells: Array) -> Array:
    """Turn seconds in each state, [row, cell, state], into pixels [row, cell, 4]; unknown time is transparent."""
    palette = np.array([STATE_COLORS[name] for name in STATE_NAMES])
    total = cells.sum(axis=2, keepdims=True)
    # Differences of sums may come out slightly below zero.
    shares = np.maximum(cells, 0.0) / np.maximum(total, 1e-9)
    # Opacity-weighted mean: sum_s share_s * opacity_s * color_s / sum_s share_s * opacity_s.
    opacity = shares @ palette[:, 3]
    color = (shares * palette[:, 3]) @ palette[:, :3] / np.maximum(opacity, 1e-9)[..., None]
    pixels = np.concatenate([color, 255 * opacity[..., None]], axis=2)
    return np.where(total > 0, pixels, 0.0).clip(0, 255).round().astype(np.uint8)


def write_picture(recording: RecordedTimeline, start: float, stop: float, path: Path) -> None:
    """Write the rows between two moments as a PNG whose pixels are the cells. It needs matplotlib."""
    from matplotlib.image import imsave

    # Fine cells: a picture covers a few seconds, in which the usual cells would be wider than a pixel.
    cells = recording.grid(PICTURE_CELL_SECONDS).cells(start, stop, PICTURE_CELLS)
    imsave(path, mix_states(cells[_learner_first(recording.tracks)]))
