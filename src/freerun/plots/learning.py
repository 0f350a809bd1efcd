"""Learning curves: interquartile means over seeds with 95 % confidence intervals, as Agarwal et al. (2021) advise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import Array, UserError
from freerun.persistence.files import read_json
from freerun.persistence.records import read_records
from freerun.plots.panels import Line, Panel

NUM_POINTS = 100
REPETITIONS = 2000
ABOUT_ONE_RUN = ("seed", "run_dir", "quiet", "watch", "display")
"""Settings in which runs of one line may differ."""


def curves(run_dirs: Sequence[Path], metric: str, x_metric: str) -> list[Panel]:
    """A panel per environment, a line per way of training."""
    groups: dict[tuple[str, str], list[tuple[Array, Array]]] = {}
    configs = {path: read_json(path / "config.json") for path in run_dirs}
    differing = _differing(list(configs.values()))
    for path, config in configs.items():
        name = " ".join(str(config.get("mode")) if key == "mode" else f"{key}={config.get(key)}" for key in differing)
        groups.setdefault((str(config.get("env")), name or str(config.get("mode"))), []).append(
            _read(path, metric, x_metric)
        )
    panels: dict[str, Panel] = {}
    for (env, name), runs in groups.items():
        panel = panels.setdefault(env, Panel(env, x_metric.replace("_", " "), metric.replace("_", " ")))
        panel.lines.append(summarised(f"{name} ({len(runs)} seed{'s' if len(runs) > 1 else ''})", runs))
    return list(panels.values())


def _differing(configs: list[dict[str, Any]]) -> list[str]:
    """What the ways of training differ in; the mode in any case."""
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [
        name
        for name in names
        if name not in (*ABOUT_ONE_RUN, "env") and len({json.dumps(config.get(name)) for config in configs}) > 1
    ]
    if "mode" in differing:  # most of the others follow from it
        return ["mode", *(name for name in ("algo", "num_workers", "max_lag") if name in differing)]
    return differing


def _read(path: Path, metric: str, x_metric: str) -> tuple[Array, Array]:
    records = list(read_records(path / "metrics.jsonl"))
    points = [(each[x_metric], each[metric]) for each in records if None not in (each.get(x_metric), each.get(metric))]
    if not points:
        known = sorted({name for record in records for name in record})
        raise UserError(f"{path} has no {metric} by {x_metric}: its metrics are {', '.join(known) or 'none yet'}")
    x, y = np.array(points, dtype=np.float64).T
    return x, y


def summarised(name: str, runs: list[tuple[Array, Array]]) -> Line:
    """Over the range that all seeds have reached."""
    first, last = max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs)
    if len(runs) == 1 or last <= first:
        x, y = runs[0]
        return Line(name, x, y)
    grid = np.linspace(first, last, NUM_POINTS)
    scores = np.stack([np.interp(grid, x, y) for x, y in runs])  # seeds, points
    try:
        from scipy.stats import bootstrap, trim_mean
    except ModuleNotFoundError:
        raise UserError("learning curves over several seeds need scipy: pip install 'freerun[plot]'") from None

    def interquartile_mean(these: Array, axis: int) -> Array:
        mean: Array = trim_mean(these, proportiontocut=0.25, axis=axis)
        return mean

    # As in rliable 1.2: seeds are drawn anew with replacement, and the interval holds 95 % of what comes of it.
    interval = bootstrap(
        (scores,), interquartile_mean, axis=0, n_resamples=REPETITIONS, method="percentile", rng=0
    ).confidence_interval
    return Line(name, grid, interquartile_mean(scores, axis=0), interval.low, interval.high)
