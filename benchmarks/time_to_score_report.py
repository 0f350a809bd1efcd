"""The report of time_to_score.py: a table per task, and return against wall-clock seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from time_to_score_systems import num_envs

from freerun.tools.plots.drawing import can_draw

Point = tuple[int, float, float, int]
"""Steps, seconds, mean return of the last 100 episodes, and episodes so far."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """A finished run, as time_to_score.json holds it."""

    task: str
    system: str
    seed: int
    conditions: dict[str, Any]
    """Score, limits, number of cores and all settings."""
    reached: bool
    seconds: float
    """From the start of training until the score was reached, or until the run ended."""
    startup_seconds: float
    """From the start of the process to the start of training: imports and construction."""
    num_steps: int
    num_episodes: int
    curve: list[Point]
    versions: dict[str, str]
    machine: str
    cores: list[int]
    num_parallel: int
    """Runs on the machine at the time, this one included."""
    process_seconds: float

    @property
    def seconds_to_score(self) -> float:
        return self.seconds if self.reached else math.inf


@dataclass(frozen=True)
class Table:
    """The runs of a task: a row per system, which may be empty."""

    task: str
    score: float
    limits: str
    reference: str
    rows: Mapping[str, Sequence[Record]]
    num_seeds: int

    @property
    def records(self) -> list[Record]:
        return [record for records in self.rows.values() for record in records]

    def seconds_to_score(self, label: str) -> float:
        """Median over seeds, infinite where less than half reached the score; NaN without runs."""
        records = self.rows.get(label, ())
        return statistics.median(record.seconds_to_score for record in records) if records else math.nan


# ---------------------------------------------------------------------------------------------- words

INTRODUCTION = """\
# How long until a score is reached?

Written by `benchmarks/time_to_score.py` from time_to_score.json. Reached: the mean return of the last 100 training
episodes (at least 20), looked at after each update, is no less than the score. Seconds: from the start of training,
when everything is built, until then; median over seeds (lowest – highest), a run that did not reach the score counts as
endless. Ratio: median over that of freerun, above 1 is slower. Steps to the score: median of the runs that reached it.
Start-up: imports and construction, before the clock starts. All systems learn a task with the same hyper-parameters
(`Learning` in `time_to_score_systems.py`), each run bound to cores of its own.
"""
HEADER = "| system | environments | reached | seconds | ratio | steps to the score | steps/s | start-up, s |"


def markdown(tables: Sequence[Table], remarks: Sequence[str]) -> str:
    lines = [INTRODUCTION]
    for table in tables:
        lines += [*_section(table), ""]
    records = [record for table in tables for record in table.records]
    machines = {f"{r.machine}; {len(r.cores)} cores a run, {r.num_parallel} at a time" for r in records}
    if len(machines) > 1:
        remarks = [*remarks, "**Not all runs were made alike, see the machines below: rows may not be comparable.**"]
    lines += [
        "## How it was run",
        "",
        *(f"- {remark}" for remark in remarks),
        *(f"- Machine: {machine}." for machine in sorted(machines)),
        *_versions(tables),
    ]
    return "\n".join(lines) + "\n"


def _section(table: Table) -> Iterator[str]:
    yield f"## {table.task}: {table.score:g}"
    yield ""
    yield f"Ends as not reached after {table.limits}."
    yield ""
    yield HEADER
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for label, records in table.rows.items():
        if not records:
            yield f"| {label} | | 0 of {table.num_seeds} runs | | | | | |"
            continue
        to_score = [record.seconds_to_score for record in records]
        steps = [record.num_steps for record in records if record.reached]
        cells = [
            _described(label, records[0].conditions["settings"]),
            str(num_envs(records[0].conditions["settings"])),
            f"{len(steps)}/{len(records)}" + (f" ({table.num_seeds} wanted)" if len(records) < table.num_seeds else ""),
            _median_and_range(to_score),
            _ratio(table, label),
            f"{statistics.median(steps):,.0f}" if steps else "not reached",
            f"{statistics.median(record.num_steps / record.seconds for record in records):,.0f}",
            f"{statistics.median(record.startup_seconds for record in records):.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _described(label: str, settings: Mapping[str, Any]) -> str:
    """freerun's row says how it collected."""
    shown = [f"{name} {settings[name]}" for name in ("max_lag", "envs_per_worker", "segment_steps") if name in settings]
    return f"{label} `{settings['mode']}`, {', '.join(shown)}".replace("_", " ") if "mode" in settings else label


def _median_and_range(seconds: Sequence[float]) -> str:
    if not math.isfinite(min(seconds)):
        return "not reached"
    return f"{_seconds(statistics.median(seconds))} ({_seconds(min(seconds))} – {_seconds(max(seconds))})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "not reached"


def _ratio(table: Table, label: str) -> str:
    own, reference = table.seconds_to_score(label), table.seconds_to_score(table.reference)
    if label == table.reference or not math.isfinite(reference):
        return ""
    return f"{own / reference:.2f}" if math.isfinite(own) else "not reached"


def _versions(tables: Sequence[Table]) -> Iterator[str]:
    """A line for each set of versions, with the systems that ran with it."""
    systems: dict[str, set[str]] = {}
    for table in tables:
        for label, records in table.rows.items():
            for record in records:
                text = ", ".join(f"{name} {version}" for name, version in record.versions.items())
                systems.setdefault(text, set()).add(label)
    for text, labels in sorted(systems.items()):
        yield f"- Versions ({', '.join(sorted(labels))}): {text}."


# ---------------------------------------------------------------------------------------------- picture

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def draw(tables: Sequence[Table], path: Path) -> None:
    """Draw a plot for each task: a thin line for each seed, the median bold, a dot where it reaches the score."""
    if not can_draw():
        print(f"left out {path}: matplotlib is not installed (--report-only draws it elsewhere)")
        return
    from matplotlib.lines import Line2D
    from pictures import make_plots, save

    labels = list(dict.fromkeys(label for table in tables for label in table.rows))
    colors = dict(zip(labels, COLORS, strict=False))
    figure, plots = make_plots(len(tables))
    for table, plot in zip(tables, plots, strict=True):
        plot.set(title=table.task, xlabel="seconds of training", ylabel="return, mean of the last 100 episodes")
        plot.axhline(table.score, color="black", linestyle=":", linewidth=1)
        for label, records in table.rows.items():
            for record in records:
                curve = np.array(record.curve)
                plot.plot(curve[:, 1], curve[:, 2], color=colors[label], linewidth=0.8, alpha=0.35)
            if records:
                seconds, median = _median_curve(records)
                plot.plot(seconds, median, color=colors[label], linewidth=2.4)
            if math.isfinite(reached := table.seconds_to_score(label)):
                plot.plot([reached], [table.score], "o", color=colors[label], markeredgecolor="white", zorder=5)
        plot.set_xlim(left=0)
    handles = [Line2D([], [], color=colors[label], linewidth=2.4, label=label) for label in labels]
    handles.append(Line2D([], [], color="black", linestyle=":", linewidth=1, label="score to be reached"))
    save(figure, path, handles)


def _median_curve(records: Sequence[Record]) -> tuple[FloatArray, FloatArray]:
    """From when every run has a return until half of them have ended; one that has ended keeps its last return."""
    curves = [np.array(record.curve, dtype=np.float64) for record in records]
    seconds = np.linspace(max(c[0, 1] for c in curves), float(np.median([c[-1, 1] for c in curves])), 200)
    values = np.array([np.interp(seconds, curve[:, 1], curve[:, 2]) for curve in curves])
    return seconds, np.median(values, axis=0)
