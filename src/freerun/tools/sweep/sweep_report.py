"""What a sweep has found: a table, a picture, trials.json for the web page, and best.json for `freerun train`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from freerun.core import RequiredPackage, UserError
from freerun.persistence.files import read_json, write_atomically, write_json
from freerun.persistence.run_folder import CONFIG
from freerun.settings.config import AnyConfig
from freerun.tools.sweep.search_space import Dimension
from freerun.tools.sweep.sweep_study import TrialRow
from freerun.tools.watch.run_list import TRIALS

logger = logging.getLogger("freerun")

BEST, TABLE, PICTURE = "best.json", "table.md", "sweep.png"
MATPLOTLIB = RequiredPackage("matplotlib", "matplotlib", "plot")
MOST_PANELS = 6
"""The picture shows this many of the varied settings: the first ones."""
STATE_COLORS = {"complete": "#00796b", "pruned": "#bdbdbd"}


def best_of(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the trial with the highest score among those that have come to their end.

    Of equal ones it is the one on the Pareto front, which took less time."""
    complete = [row for row in rows if row.state == "complete" and row.score is not None]
    return max(complete, key=lambda row: (row.score or 0.0, row.on_front), default=None)


def ranked(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials, the best first; those that did not come to their end last."""

    def place(row: TrialRow) -> tuple[bool, float, bool, int]:
        score = row.score if row.score is not None else -math.inf
        return row.state != "complete", -score, not row.on_front, row.number

    return sorted(rows, key=place)


def cells(row: TrialRow, names: Sequence[str]) -> list[str]:
    """Return the text of each column of the table: trial, score, seconds, state, and the varied settings."""
    score = "–" if row.score is None else f"{row.score:.2f}"
    seconds = "–" if row.seconds is None else f"{row.seconds:.1f}"
    state = row.state + (", on the front" if row.on_front else "")
    return [str(row.number), score, seconds, state, *(_short(row.parameters.get(name)) for name in names)]


def columns(names: Sequence[str]) -> list[str]:
    return ["trial", "score", "seconds", "state", *(name.replace("_", "-") for name in names)]


def _short(parameter: object) -> str:
    return "–" if parameter is None else f"{parameter:.4g}" if isinstance(parameter, float) else str(parameter)


def sentence(rows: Sequence[TrialRow], number: int, num_trials: int) -> str:
    """Describe a trial that has just ended."""
    row = next(row for row in rows if row.number == number)
    settings = ", ".join(f"{name.replace('_', '-')} {_short(value)}" for name, value in row.parameters.items())
    how = row.state if row.score is None else f"{row.state}, score {row.score:.2f}"
    ended = sum(other.state != "running" for other in rows)
    best = best_of(rows)
    mark = "" if best is None else f"; best {best.score:.2f} (trial {best.number})"
    why = f" ({row.reason})" if row.state == "failed" and row.reason else ""
    return f"[{ended}/{num_trials}] trial {number}: {settings}: {how}{why}{mark}"


def print_table(rows: Sequence[TrialRow], names: Sequence[str], console: Console) -> None:
    """Print all trials, the best first."""
    table = Table(title="Trials", title_justify="left", box=box.SIMPLE_HEAD)
    for title in columns(names):
        table.add_column(title, justify="right", no_wrap=True)
    for row in ranked(rows):
        table.add_row(*cells(row, names), style="bold green" if row.on_front or row is best_of(rows) else None)
    console.print(table)


def markdown(rows: Sequence[TrialRow], names: Sequence[str]) -> str:
    """Return the table as Markdown."""
    titles = columns(names)
    lines = [f"| {' | '.join(titles)} |", "|" + " ---: |" * len(titles)]
    lines += [f"| {' | '.join(cells(row, names))} |" for row in ranked(rows)]
    return "\n".join(lines) + "\n"


def write(
    folder: Path, config: AnyConfig, dimensions: Sequence[Dimension], rows: Sequence[TrialRow], has_begun: bool
) -> None:
    """Write trials.json; table.md and best.json too, unless a trial has only begun, which changes neither.

    A full disk costs the report, not the sweep.
    """
    names = [dimension.name for dimension in dimensions]
    try:
        trials = [dataclasses.asdict(row) for row in rows]
        write_json(folder / TRIALS, {"env": str(config.env), "vary": names, "trials": trials})
        if has_begun:
            return  # every file costs milliseconds until it is on the disk
        write_atomically(folder / TABLE, markdown(rows, names).encode())
        if (best := best_of(rows)) is not None:
            write_json(folder / BEST, {**read_json(folder / best.runs[0] / CONFIG), "quiet": config.quiet})
    except (OSError, UserError) as error:
        logger.warning("the report of the sweep could not be written: %s", error)


def draw(folder: Path, dimensions: Sequence[Dimension], rows: Sequence[TrialRow]) -> None:
    """Draw the scores by each varied setting, and by seconds."""
    shown = [row for row in rows if row.state in STATE_COLORS and row.score is not None]
    if not shown:
        return
    if not MATPLOTLIB.is_installed:
        logger.warning("%s is not drawn, because it needs matplotlib: %s", PICTURE, MATPLOTLIB.advice)
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    chosen = dimensions[:MOST_PANELS]
    figure = Figure(figsize=(3.4 * (len(chosen) + 1), 3.2), layout="constrained")
    panels: Any = figure.subplots(1, len(chosen) + 1, sharey=True, squeeze=False)[0]
    for axes, dimension in zip(panels, chosen, strict=False):
        _scatter(axes, shown, [_position(dimension, row) for row in shown])
        axes.set_xlabel(dimension.flag)
        if not dimension.is_range:
            axes.set_xticks(range(len(dimension.texts)), dimension.texts)
        elif dimension.is_log:
            axes.set_xscale("log")
            # matplotlib's own labels of a range that is narrower than a decade run into each other.
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
    _scatter(panels[-1], shown, [row.seconds or 0.0 for row in shown])
    front = sorted((row.seconds or 0.0, row.score or 0.0) for row in shown if row.on_front)
    if front:
        panels[-1].step(*zip(*front, strict=True), where="post", color="#c62828", label="Pareto front")
    panels[-1].set_xlabel("seconds of training")
    panels[0].set_ylabel("score")
    panels[-1].legend(loc="best", fontsize="small")
    figure.savefig(folder / PICTURE, dpi=110)


def _position(dimension: Dimension, row: TrialRow) -> float:
    """Return where a trial stands on the axis of a setting: its number, or the place of its value in the list."""
    parameter = row.parameters[dimension.name]
    return dimension.texts.index(str(parameter)) if not dimension.is_range else float(parameter)


def _scatter(axes: Any, rows: Sequence[TrialRow], positions: Sequence[float]) -> None:
    for state, color in STATE_COLORS.items():
        points = [(x, row.score) for x, row in zip(positions, rows, strict=True) if row.state == state]
        if points:
            axes.scatter(*zip(*points, strict=True), color=color, label=state, s=22, zorder=3)
    axes.grid(color="#eeeeee")
