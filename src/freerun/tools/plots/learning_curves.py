"""Draws learning curves: interquartile means over seeds with 95 % confidence intervals, as in Agarwal et al. (2021)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import read_json
from freerun.persistence.metric_records import read_records
from freerun.persistence.run_folder import without_seed
from freerun.tools.plots.panels import Panel, PlotLine, read_each

NUM_POINTS = 100
NUM_RESAMPLES = 2000


def curves(run_dirs: Sequence[Path], metric: str, x_metric: str) -> list[Panel]:
    """Return a panel for each environment, with a line for each group of runs that differ only in their seed."""
    groups: dict[tuple[str, str], list[tuple[Array, Array]]] = {}
    points = read_each(run_dirs, lambda path: _read(path, metric, x_metric))
    configs = {path: read_json(path / "config.json") for path in points}
    differing = _differing(list(configs.values()))
    for path, config in configs.items():
        name = " ".join(str(config.get("mode")) if key == "mode" else f"{key}={config.get(key)}" for key in differing)
        groups.setdefault((str(config.get("env")), name or str(config.get("mode"))), []).append(points[path])
    panels: dict[str, Panel] = {}
    for (env, name), runs in groups.items():
        panel = panels.setdefault(env, Panel(env, x_metric.replace("_", " "), metric.replace("_", " ")))
        panel.lines.append(summary_line(f"{name} ({len(runs)} seed{'s' if len(runs) > 1 else ''})", runs))
    return list(panels.values())


def _differing(configs: list[dict[str, Any]]) -> list[str]:
    """Return the settings in which runs differ, apart from their seed. They name the lines.

    Runs of different modes differ in many settings that follow from the mode. Such a setting is left out unless it also
    differs between runs of one mode, which must not be taken for seeds of the same line.
    """
    shared = [without_seed(config) for config in configs]
    names = dict.fromkeys(name for config in shared for name in config if name != "env")
    modes = {config.get("mode") for config in shared}
    if len(modes) == 1:
        return [name for name in names if _varies(shared, name)]
    of_each = [[config for config in shared if config.get("mode") == mode] for mode in modes]
    # These three are compared so often that a line always names them where they differ.
    always = [name for name in ("algo", "num_workers", "max_lag") if _varies(shared, name)]
    within = [name for name in names if any(_varies(group, name) for group in of_each)]
    return list(dict.fromkeys(["mode", *always, *within]))


def _varies(configs: list[dict[str, Any]], name: str) -> bool:
    # As JSON, because settings may be lists and dicts, which a set cannot hold.
    return len({json.dumps(config.get(name)) for config in configs}) > 1


def _read(path: Path, metric: str, x_metric: str) -> tuple[Array, Array]:
    records = list(read_records(path / "metrics.jsonl"))
    points = [(each[x_metric], each[metric]) for each in records if None not in (each.get(x_metric), each.get(metric))]
    if not points:
        raise UserError(f"{path} has {_missing_text(records, metric, x_metric)}")
    x, y = np.array(points, dtype=np.float64).T
    return x, y


def _missing_text(records: list[dict[str, float | None]], metric: str, x_metric: str) -> str:
    """Say why there is no point to draw."""
    if not records:
        return "no update yet"
    with_value = {name for record in records for name, value in record.items() if value is not None}
    for name in (metric, x_metric):
        if not any(name in record for record in records):
            return f"no metric {name}; it has {', '.join(sorted(with_value))}"
    sentence = f"no value of {metric if metric not in with_value else x_metric}"
    return sentence + (", because no episode has ended in it" if records[-1].get("episodes") == 0 else "")


def summary_line(name: str, runs: list[tuple[Array, Array]]) -> PlotLine:
    """Return the line of some runs over the range of x that all of them have reached."""
    first, last = max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs)
    if len(runs) == 1 or last <= first:  # one seed has no interval, and seeds without common x have no mean
        x, y = runs[0]
        return PlotLine(name, x, y)
    # Seeds have points at different x, so each is interpolated on the same grid.
    grid = np.linspace(first, last, NUM_POINTS)
    scores = np.stack([np.interp(grid, x, y) for x, y in runs])  # seeds, points
    try:
        from scipy.stats import bootstrap, trim_mean
    except ModuleNotFoundError:
        raise UserError("learning curves over several seeds need scipy: pip install 'freerun[plot]'") from None

    def interquartile_mean(these: Array, axis: int) -> Array:
        # The mean of the middle half: a quarter of the seeds is cut off at each end.
        mean: Array = trim_mean(these, proportiontocut=0.25, axis=axis)
        return mean

    # As in rliable 1.2: resample the seeds with replacement; the interval holds 95 % of the resampled means.
    interval = bootstrap(
        (scores,), interquartile_mean, axis=0, n_resamples=NUM_RESAMPLES, method="percentile", rng=0
    ).confidence_interval
    return PlotLine(name, grid, interquartile_mean(scores, axis=0), interval.low, interval.high)
