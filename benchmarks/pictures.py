"""The frame that the benchmarks' pictures share: plots in one style, side by side, and one legend below all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

NUM_COLUMNS = 3
DRAWN_FROM = "Drawn from"
"""The keyword of the text in a picture that says which results it shows."""


def make_plots(num_plots: int, inches: tuple[float, float] = (5.0, 3.8), **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its plots, at most three in a row; `options` are those of matplotlib's `subplots`."""
    num_columns = min(NUM_COLUMNS, num_plots)
    num_rows = math.ceil(num_plots / num_columns)
    size = (inches[0] * num_columns, inches[1] * num_rows)
    # A Figure of its own, without pyplot, needs no choice of a backend and no screen.
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False, **options).flat)
    for plot in axes:
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
    for plot in axes[num_plots:]:
        plot.set_axis_off()
    return figure, axes[:num_plots]


def save(figure: Figure, path: Path, legend: Sequence[Artist] | None = None) -> None:
    """Write the figure; without handles for the legend, it names the labelled lines of the first plot."""
    handles = figure.axes[0].get_legend_handles_labels()[0] if legend is None else list(legend)
    # A plot is wide enough for two entries.
    num_columns = min(len(handles), max(2, 2 * round(figure.get_figwidth() / 5.0)))
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize="small")
    figure.savefig(path, metadata={DRAWN_FROM: digest_of_results(path)})
    print(f"wrote {path}")


def mark_as_drawn(path: Path) -> None:
    """Note in a picture that something else has drawn which results it shows, as `save` does."""
    info = PngInfo()
    info.add_text(DRAWN_FROM, digest_of_results(path))
    with Image.open(path) as picture:
        picture.save(path, pnginfo=info, dpi=picture.info.get("dpi"))


def is_drawn(path: Path) -> bool:
    """Return whether a picture shows the results that lie beside it, so that it need not be drawn again."""
    if not path.exists():
        return False
    # A text chunk of a PNG file is a keyword, a zero byte and the text.
    return f"{DRAWN_FROM}\0{digest_of_results(path)}".encode() in path.read_bytes()


def digest_of_results(path: Path) -> str:
    """Return a digest of the JSON file that has the name of a picture."""
    return hashlib.sha256(path.with_suffix(".json").read_bytes()).hexdigest()
