"""The timeline in a terminal: a row for the learner, for its stages and for every worker, or group of workers."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from freerun.core import State
from freerun.telemetry.timeline import STATE_NAMES, Recording

NUM_CELLS = 60
MOST_WORKER_ROWS = 16
SHADES = "░▒▓█"
"""By the share of a cell that was busy: under a quarter, a half, three quarters, above."""
RESTARTING = "x"
NOTHING = " "


def chart(recording: Recording) -> Group:
    grid = recording.grid()
    seconds = max(grid.seconds, 1e-6)
    by_track = grid.cells(0.0, seconds, NUM_CELLS)
    table = Table.grid(padding=(0, 1))
    for name, tracks in _rows(recording.tracks):
        parts = by_track[tracks].sum(axis=0)
        symbols = "".join(_symbol(part) for part in parts.tolist())
        table.add_row(name, Text(symbols, style="green"), _told(parts.sum(axis=0).tolist()))
    axis = Text(f"0 s{f'{seconds:.1f} s':>{NUM_CELLS - 3}}", style="dim")
    table.add_row("", axis, "")
    return Group(Text("█ busy  ░ waiting  x restarting", style="dim"), table)


def _rows(names: list[str]) -> list[tuple[str, list[int]]]:
    """The learner and its stages first; then workers, neighbours together where there are many."""
    others = [(name, [track]) for track, name in enumerate(names) if not name.startswith("worker")]
    workers = [track for track, name in enumerate(names) if name.startswith("worker")]
    size = -(-len(workers) // MOST_WORKER_ROWS)
    groups = [workers[start : start + size] for start in range(0, len(workers), size or 1)]
    return others + [
        (names[group[0]] if len(group) == 1 else f"workers {group[0]}–{group[-1]}", group) for group in groups
    ]


def _symbol(spent: list[float]) -> str:
    whole = sum(spent)
    if not whole:
        return NOTHING
    if spent[State.RESTARTING] / whole > 0.5:
        return RESTARTING
    return SHADES[min(3, int(4 * spent[State.BUSY] / whole))]


def _told(totals: list[float]) -> Text:
    whole = sum(totals)
    told = [
        f"{spent / whole:4.0%} {name}" for name, spent in zip(STATE_NAMES, totals, strict=True) if spent > 0.005 * whole
    ]
    return Text("  ".join(told), style="dim")
