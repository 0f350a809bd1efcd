"""The timeline in a terminal: a row for the learner, for its stages and for every worker, or group of workers."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from freerun.core import State
from freerun.telemetry.timeline import STATE_NAMES, Recording

FEWEST_CELLS, MOST_CELLS = 20, 60
WORDS_WIDTH = 44
"""Of what is said of a row: 100% busy, waits 14% slot 82% weights."""
MOST_WORKER_ROWS = 16
SHADES = "░▒▓█"
"""By the share of a cell that was busy: under a quarter, a half, three quarters, above."""
RESTARTING = "x"
NOTHING = " "


def chart(recording: Recording, width: int) -> Group:
    names_width = max(len(name) for name, _ in _rows(recording.tracks))
    num_cells = max(FEWEST_CELLS, min(MOST_CELLS, width - names_width - WORDS_WIDTH))
    grid = recording.grid()
    seconds = max(grid.seconds, 1e-6)
    by_track = grid.cells(0.0, seconds, num_cells)
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for name, tracks in _rows(recording.tracks):
        parts = by_track[tracks].sum(axis=0)
        if not parts.any():  # workers that there might have been, with --adapt
            continue
        symbols = "".join(_symbol(part) for part in parts.tolist())
        table.add_row(name, Text(symbols, style="green"), _told(parts.sum(axis=0).tolist()))
    axis = Text(f"0 s{f'{seconds:.1f} s':>{num_cells - 3}}", style="dim")
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
    if not whole or spent[State.PARKED] / whole > 0.5:
        return NOTHING
    if spent[State.RESTARTING] / whole > 0.5:
        return RESTARTING
    return SHADES[min(3, int(4 * spent[State.BUSY] / whole))]


def _told(totals: list[float]) -> Text:
    """Busy, and what was waited for; not what was done without."""
    there = {name: spent for name, spent in zip(STATE_NAMES, totals, strict=True) if name != STATE_NAMES[State.PARKED]}
    whole = sum(there.values()) or 1.0
    shares = {name: spent / whole for name, spent in there.items()}
    busy = shares.pop(STATE_NAMES[State.BUSY])
    waits = [f"{share:.0%} {name.removeprefix('waiting-for-')}" for name, share in shares.items() if share >= 0.005]
    return Text(f"{busy:4.0%} busy" + (f", waits {' '.join(waits)}" if waits else ""), style="dim")
