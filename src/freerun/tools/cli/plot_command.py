"""`freerun plot`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from freerun.settings.flag_parsing import parse


@dataclass(frozen=True)
class _PlotFlags:
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write: .png, .svg or .pdf, or .html to zoom in."""
    paths: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN_DIR")]] = (Path("runs"),)
    """Runs, or folders of runs. Runs that differ only in their seed become one learning curve."""
    what: Literal["curves", "timeline", "scaling"] = "curves"
    """Learning curves (the interquartile mean over seeds and its 95 % confidence interval), a timeline of who was busy
    when, or steps per second by the number of workers."""
    metric: str = "return_mean"
    """For curves: any metric in metrics.jsonl."""
    x: str = "step"
    """For curves: the metric on the horizontal axis, such as wall_seconds."""


def plot(words: list[str]) -> int:
    """Draw learning curves, timelines or scaling of runs."""
    options = parse(_PlotFlags, words, prog="freerun plot", description=plot.__doc__)
    from freerun.tools.plots import drawing, learning_curves, panels, timeline_panels

    runs = panels.find_runs(options.paths)
    if options.what == "curves":
        drawn = learning_curves.curves(runs, options.metric, options.x)
    else:
        drawn = timeline_panels.timelines(runs) if options.what == "timeline" else panels.scaling(runs)
    drawing.draw(drawn, options.output)
    print(options.output)
    return 0
