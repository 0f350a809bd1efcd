"""Draws the timeline in a terminal: a row for the learner, each of its stages, and each worker or group of workers."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from freerun.core import State
from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline

FEWEST_CELLS, MOST_CELLS = 10, 60
MOST_WORKER_ROWS = 16
SHADES = "░▒▓█"
"""By the share of a cell's time that was busy: under a quarter, a half, three quarters, and above."""
RESTARTING = "x"
NOTHING = " "
LEGEND = "░ busy under 25 %  ▒ 25–50 %  ▓ 50–75 %  █ over 75 %  x restarting"


def chart(recording: RecordedTimeline, width: int) -> Group:
    """Draw the chart of a whole run, for a terminal of this width."""
    grid = recording.grid()
    seconds = max(grid.seconds, 1e-6)
    totals = grid.cells(0.0, seconds, 1)[:, 0]
    # Leave out workers that --adapt could have started and never did.
    rows = [(name, tracks) for name, tracks in _rows(recording.tracks) if totals[tracks].any()]
    shares = [_shares_text(totals[tracks].sum(axis=0).tolist()) for _, tracks in rows]
    names_width = max((len(name) for name, _ in rows), default=0)
    shares_width = max((text.cell_len for text in shares), default=0)
    num_cells = max(FEWEST_CELLS, min(MOST_CELLS, width - names_width - shares_width - 2))
    by_track = grid.cells(0.0, seconds, num_cells)
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for (name, tracks), text in zip(rows, shares, strict=True):
        symbols = "".join(_symbol(part) for part in by_track[tracks].sum(axis=0).tolist())
        table.add_row(name, Text(symbols, style="green"), text)
    # "0 s" on the left and the length of the run on the right, as wide as the cells.
    axis = Text(f"0 s{f'{seconds:.1f} s':>{num_cells - 3}}", style="dim")
    table.add_row("", axis, "")
    return Group(Text(LEGEND, style="dim"), table)


def _rows(names: list[str]) -> list[tuple[str, list[int]]]:
    """Return names and tracks of the rows: first the learner and its stages, then workers, in groups if there are
    many."""
    others = [(name, [track]) for track, name in enumerate(names) if not name.startswith("worker")]
    workers = [track for track, name in enumerate(names) if name.startswith("worker")]
    # The smallest group size that needs no more than MOST_WORKER_ROWS rows (division, rounded up).
    size = -(-len(workers) // MOST_WORKER_ROWS)
    groups = [workers[start : start + size] for start in range(0, len(workers), size or 1)]
    return others + [
        (names[group[0]] if len(group) == 1 else f"workers {group[0]}–{group[-1]}", group) for group in groups
    ]


def _symbol(spent: list[float]) -> str:
    """Return the character for one cell."""
    whole = sum(spent)
    # The states that are not shades win only with more than half of the cell.
    if not whole or spent[State.PARKED] / whole > 0.5:
        return NOTHING
    if spent[State.RESTARTING] / whole > 0.5:
        return RESTARTING
    return SHADES[min(3, int(4 * spent[State.BUSY] / whole))]


def _shares_text(totals: list[float]) -> Text:
    """Return the shares of busy and waiting time; the time of parked workers does not count."""
    counted = {
        name: spent for name, spent in zip(STATE_NAMES, totals, strict=True) if name != STATE_NAMES[State.PARKED]
    }
    whole = sum(counted.values()) or 1.0
    shares = {name: spent / whole for name, spent in counted.items()}
    busy = shares.pop(STATE_NAMES[State.BUSY])
    # Smaller shares would be shown as 0 %.
    waits = [f"{share:.0%} {name.removeprefix('waiting-for-')}" for name, share in shares.items() if share >= 0.005]
    return Text(f"{busy:4.0%} busy" + (f", waits {' '.join(waits)}" if waits else ""), style="dim")
