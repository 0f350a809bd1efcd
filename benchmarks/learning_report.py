"""The report of learning.py: scores beside those of the reference, with their noise, and the learning curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freerun.tools.plots.drawing import can_draw


@dataclass(frozen=True)
class Record:
    """A finished run, as learning.json holds it."""

    task: str
    system: str
    seed: int
    settings: dict[str, Any]
    score: float
    """Mean return of the last 100 training episodes."""
    num_steps: int
    num_episodes: int
    num_updates: int
    lag_mean: float
    wall_seconds: float
    """Of training and its set-up, imports left out."""
    curve: list[tuple[int, float, float]]
    """Steps so far, mean return of the last 100 episodes, seconds so far; at most 200 points."""
    versions: dict[str, str]
    machine: str
    process_seconds: float = math.nan
    """Of the whole process."""


@dataclass(frozen=True)
class Table:
    """The runs of a task: a row per system, which may be empty."""

    task: str
    about: str
    rows: Mapping[str, Sequence[Record]]
    num_seeds: int

    @property
    def records(self) -> list[Record]:
        return [record for records in self.rows.values() for record in records]

    def mean_score(self, label: str) -> float:
        """Return the mean over seeds, which is not a number where there is no run."""
        scores = [record.score for record in self.rows.get(label, ())]
        return float(np.mean(scores)) if scores else math.nan


# ---------------------------------------------------------------------------------------------- noise


def student_t_975(degrees: float) -> float:
    """The 97.5 % quantile, by adding up the density: no need of scipy. At one degree of freedom it is 12.7."""
    t = np.linspace(0.0, 13.0, 130_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(t**2 / degrees))
    area = np.cumsum((density[1:] + density[:-1]) / 2 * (t[1] - t[0]))
    return float(np.interp(0.475, area, t[1:]))


FEWEST_SEEDS = 4
"""With fewer, the interval is so wide that nothing lies outside it: no comparison rather than a kind one."""


def welch_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mean(a) − mean(b) without assuming equal variances (Welch 1947); needs a few values of each."""
    if min(len(a), len(b)) < FEWEST_SEEDS:
        return None
    difference = float(np.mean(a) - np.mean(b))
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    if sum(parts) == 0:
        return difference, difference
    degrees = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
    margin = student_t_975(degrees) * math.sqrt(sum(parts))
    return difference - margin, difference + margin


# ---------------------------------------------------------------------------------------------- words

NO_WORSE, WORSE, NOT_SHOWN = "yes", "**no**", "not shown"
MARGIN = 0.1
"""Of what the reference gains over random actions."""
INTRODUCTION = """\
# Do freerun's PPO and SAC learn as well as Stable-Baselines3's?

Written by `benchmarks/learning.py` from learning.json. Return: the mean over the last 100 training episodes at the end
of a run, in both libraries (SAC's runs on Pendulum have 50 episodes, which are all counted); median over seeds
(lowest – highest). Minus SB3: the difference of the means over seeds, with Welch's 95 % interval. No worse: *yes* if
all of that interval lies above minus the margin, **no** if all of it is below, *not shown* if seeds differ by too much
to tell. The margin is a tenth of what SB3 gains over random actions.
Steps and updates: medians; freerun learns from whole episodes, so they may differ from SB3's. Seconds were taken while
several runs shared the machine: they are no measure of speed.
"""


def markdown(tables: Sequence[Table], reference: str, baseline: str, remarks: Sequence[str]) -> str:
    """Write the page. The others are compared with the reference; the baseline's runs learn nothing."""
    verdicts: list[str] = []
    lines = [INTRODUCTION]
    for table in tables:
        if table.records:
            lines += [*_section(table, reference, baseline, verdicts), ""]
    records = [record for table in tables for record in table.records]
    lines += [
        "## In sum",
        "",
        f"- Of {len(verdicts)} comparisons, {verdicts.count(NO_WORSE)} show that freerun is no worse than SB3 by more "
        f"than the margin, {verdicts.count(WORSE)} that it is, and {verdicts.count(NOT_SHOWN)} neither."
        if verdicts
        else "- No comparison yet: it takes four seeds of SB3 and four of another system.",
        *(f"- {remark}" for remark in remarks),
        *sorted({f"- Machine: {record.machine}" for record in records}),
        *sorted({f"- Versions: {', '.join(f'{k} {v}' for k, v in record.versions.items())}" for record in records}),
    ]
    return "\n".join(lines) + "\n"


def _section(table: Table, reference: str, baseline: str, verdicts: list[str]) -> Iterator[str]:
    """A task's rows; its verdicts are added to those of the others."""
    yield f"## {table.task}"
    yield ""
    yield table.about
    yield ""
    reference_scores = [record.score for record in table.rows.get(reference, ())]
    margin = MARGIN * (table.mean_score(reference) - table.mean_score(baseline))
    # A task may have been given more seeds than the others.
    num_seeds = max(table.num_seeds, *(len(records) for records in table.rows.values()))
    yield f"| system | seeds | return | steps / updates | mean lag | seconds | minus SB3 | no worse by {margin:.0f} |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for label, records in table.rows.items():
        if not records:  # a remark below the tables names what is missing
            continue
        scores = [record.score for record in records]
        cells = [
            label,
            f"{len(records)} of {num_seeds}",
            f"{np.median(scores):.1f} ({min(scores):.1f} – {max(scores):.1f})",
            f"{np.median([r.num_steps for r in records]):.0f} / {np.median([r.num_updates for r in records]):.0f}",
            f"{np.mean([record.lag_mean for record in records]):.2f}",
            f"{np.median([record.wall_seconds for record in records]):.0f}",
        ]
        if label in (reference, baseline):
            cells += ["", ""]
        elif (interval := welch_interval(scores, reference_scores)) is None:
            cells += ["", "too few seeds"]
        else:
            low, high = interval
            verdicts.append(NO_WORSE if low >= -margin else WORSE if high < -margin else NOT_SHOWN)
            difference = np.mean(scores) - np.mean(reference_scores)
            cells += [f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]", verdicts[-1]]
        yield f"| {' | '.join(cells)} |"
    yield from _same_scores(table)


def _same_scores(table: Table) -> Iterator[str]:
    """Without lag, episodes do not depend on the mode: rows may hold the same runs, which are then no new evidence."""
    by_scores: dict[tuple[float, ...], list[str]] = {}
    for label, records in table.rows.items():
        if records:
            by_scores.setdefault(tuple(record.score for record in records), []).append(label)
    for labels in by_scores.values():
        if len(labels) > 1:
            yield ""
            yield f"The same scores, seed by seed: {', '.join(labels)}."


# ---------------------------------------------------------------------------------------------- picture


def draw(tables: Sequence[Table], reference: str, path: Path) -> None:
    """Draw a plot for each task: the mean over seeds, and a band from the lowest to the highest of the reference."""
    if not can_draw():
        print(f"left out {path}: matplotlib is not installed (--report-only draws it elsewhere)")
        return
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
    from pictures import make_plots, save

    tables = [table for table in tables if table.records]
    labels = list(dict.fromkeys(label for table in tables for label, records in table.rows.items() if records))
    others = [label for label in labels if label != reference]
    looks = {label: _look(number) for number, label in enumerate(others)}
    looks[reference] = {"color": "black", "linewidth": 2.0}
    figure, plots = make_plots(len(tables))
    for table, plot in zip(tables, plots, strict=True):
        plot.set(title=table.task, xlabel="thousand steps", ylabel="return, last 100 episodes")
        plot.xaxis.set_major_locator(MaxNLocator(6))
        plot.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:.0f}")
        for label, records in table.rows.items():
            if records:
                steps, curves = _on_common_steps(records)
                plot.plot(steps, curves.mean(axis=0), **looks[label])
                if label == reference:  # bands of many systems, one above another, would hide all of them
                    low, high = curves.min(axis=0), curves.max(axis=0)
                    plot.fill_between(steps, low, high, color="black", alpha=0.12, linewidth=0)
    save(figure, path, [Line2D([], [], label=label, **looks[label]) for label in labels])


def _look(number: int) -> dict[str, Any]:
    """Return a colour and, when matplotlib's ten are used up, another kind of line."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.2}


def _on_common_steps(records: Sequence[Record]) -> tuple[Any, Any]:
    """Steps, and a row of returns for each run; they begin when every run has finished an episode."""
    points = [np.array(record.curve) for record in records]
    first, last = max(run[0, 0] for run in points), min(run[-1, 0] for run in points)
    steps = np.linspace(first, last, 200)
    return steps, np.array([np.interp(steps, run[:, 0], run[:, 1]) for run in points])
