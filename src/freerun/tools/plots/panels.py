"""What is drawn, apart from how: panels that hold lines with bands, or rows of coloured cells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import read_json

logger = logging.getLogger("freerun")
T = TypeVar("T")


@dataclass(frozen=True)
class PlotLine:
    """A line, and a band from `low` to `high` around it where both are given."""

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class PlotRows:
    """One row of coloured cells for each name; all rows cover the same seconds."""

    names: list[str]
    pixels: Array
    """[row, cell, 4] with red, green, blue and opacity as bytes."""
    seconds: float


@dataclass(frozen=True)
class Panel:
    """One plot with its axes."""

    title: str
    x_label: str
    y_label: str
    lines: list[PlotLine] = field(default_factory=list)
    rows: PlotRows | None = None
    whole_x: bool = False
    """True where x counts something, so that the axis shows no fractions."""


# ---------------------------------------------------------------------------------------------- reading runs


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return each path that is a run folder, and the run folders directly inside each path that is not."""
    found = []
    for path in paths:
        is_run = (path / "config.json").is_file()
        inside = [path] if is_run else sorted(each.parent for each in path.glob("*/config.json"))
        if not inside:
            raise UserError(f"{path} holds no run: name a folder made by freerun train, or one that holds several")
        for run_dir in inside:
            if not {"env", "mode"} <= read_json(run_dir / "config.json").keys():
                raise UserError(
                    f"{run_dir / 'config.json'} does not describe a run: name a folder made by freerun train"
                )
        found += inside
    return found


def read_each(run_dirs: Sequence[Path], read: Callable[[Path], T]) -> dict[Path, T]:
    """Return what `read` returns for each run. A run for which it raises a UserError is left out with a warning.

    If no run is left, the UserError is raised.
    """
    found: dict[Path, T] = {}
    problems: list[UserError] = []
    for path in run_dirs:
        try:
            found[path] = read(path)
        except UserError as problem:
            problems.append(problem)
    if not found and len(problems) > 1:
        raise UserError(f"none of these {len(problems)} runs can be drawn; the first: {problems[0]}")
    if not found:
        raise problems[0]
    for reason in problems:
        logger.warning("left out: %s", reason)
    return found


# ---------------------------------------------------------------------------------------------- scaling


def scaling(run_dirs: Sequence[Path]) -> list[Panel]:
    """Draw steps per second by the number of workers; runs of one line with as many workers are averaged.

    Each environment, algorithm and mode has its own line, because their steps take different times.
    """
    points: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for line, num_workers, rate in read_each(run_dirs, _rate).values():
        points.setdefault(line, {}).setdefault(num_workers, []).append(rate)
    differs = [len(set(values)) > 1 for values in zip(*points, strict=True)]
    differs[-1] = True  # a line always names its mode, also when all runs have the same one
    lines = []
    for key, rates in sorted(points.items()):
        workers = sorted(rates)
        means, lows, highs = (np.array([reduce(rates[num]) for num in workers]) for reduce in (np.mean, min, max))
        name = ", ".join(part for part, is_named in zip(key, differs, strict=True) if is_named)
        lines.append(PlotLine(name, np.array(workers), means, lows, highs))
    env = next(iter(points))[0]
    title = "Scaling" if differs[0] or not env else f"Scaling: {env}"
    return [Panel(title, "workers", "steps per second", lines, whole_x=True)]


def _rate(path: Path) -> tuple[tuple[str, ...], int, float]:
    """Return the line that a run belongs to (environment, algorithm, mode), its workers and its steps per second."""
    summary: dict[str, Any] = read_json(path / "summary.json")
    try:
        line = tuple(str(summary.get(name) or "") for name in ("env", "algo", "mode"))
        return line, int(summary["num_workers"]), float(summary["steps_per_second"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path / 'summary.json'} does not say how fast the run was with how many workers") from None
