"""`freerun plot`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from freerun.parsing import parse


@dataclass(frozen=True)
class _Plot:
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write: .png, .svg or .pdf, or .html to zoom in."""
    paths: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN_DIR")]] = (Path("runs"),)
    """Runs, or folders of runs. Those that differ only in their seed are one learning curve."""
    what: Literal["curves", "timeline", "scaling"] = "curves"
    """Learning curves (interquartile mean over seeds and its 95 % confidence interval), who was busy when, or steps per
    second by the number of workers."""
    metric: str = "return_mean"
    """For curves: any of metrics.jsonl."""
    x: str = "step"
    """For curves: what is on the other axis, such as wall_seconds."""


def plot(words: list[str]) -> int:
    """Draw learning curves, timelines or scaling of runs."""
    options = parse(_Plot, words, prog="freerun plot", description=plot.__doc__)
    from freerun.plots import drawing, learning, panels

    runs = panels.find_runs(options.paths)
    if options.what == "curves":
        drawn = learning.curves(runs, options.metric, options.x)
    else:
        drawn = panels.timelines(runs) if options.what == "timeline" else panels.scaling(runs)
    drawing.draw(drawn, options.output)
    print(options.output)
    return 0
