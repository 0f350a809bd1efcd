"""Pictures of a flight over rough terrain: from above as an array, or in three dimensions with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.core import UserError
from freerun_envs.terrain import ARENA_METRES, GRID_METRES, HALF_METRES, Heights

Picture = NDArray[np.uint8]
Floats = NDArray[np.float64]

PIXELS_PER_METRE = 8
SIDE = round(ARENA_METRES * PIXELS_PER_METRE)
STRIP = 72
"""The height of the altitude strip below the map, in pixels."""
GROUND_COLOURS = np.array([(62, 90, 66), (122, 138, 88), (186, 165, 118), (150, 122, 100), (236, 232, 226)], float)
"""The colours of the ground, from the lowest to the highest."""
FOG_COLOUR, FOG = np.array((48.0, 56.0, 78.0)), 0.62
"""The colour that is mixed over unseen ground, and its share."""
PATH_COLOUR, DRONE_COLOUR, GOAL_COLOUR = (255, 214, 10), (230, 30, 60), (0, 170, 255)
SUN = np.array([-0.5, 0.5, 0.7]) / np.linalg.norm([-0.5, 0.5, 0.7])
"""The unit vector to the sun, which stands in the north-west, as on maps."""


def shaded_relief(heights: Heights) -> Floats:
    """Colours [y, x, 3] at the points of the grid: by height, and darker on slopes that face away from the sun."""
    # Lambert: light = n · sun, where the normal of z = h(x, y) is (-dh/dx, -dh/dy, 1), normalised.
    y_slope, x_slope = np.gradient(heights.astype(float), GRID_METRES)
    normal = np.stack([-x_slope, -y_slope, np.ones_like(x_slope)], -1)
    light = np.clip((normal / np.linalg.norm(normal, axis=-1, keepdims=True)) @ SUN, 0.0, 1.0)
    level = heights / heights.max() * (len(GROUND_COLOURS) - 1)
    steps = np.arange(len(GROUND_COLOURS))
    colours = np.stack([np.interp(level, steps, GROUND_COLOURS[:, k]) for k in range(3)], -1)
    # 0.45 is light from all sides, so that slopes in the shade stay visible.
    shaded: Floats = np.clip(colours * (0.45 + 0.75 * light[..., None]), 0.0, 255.0)
    return shaded


def _fog(colours: Floats, seen: NDArray[np.bool_]) -> Floats:
    covered: Floats = np.where(seen[..., None], colours, colours * (1 - FOG) + FOG_COLOUR * FOG)
    return covered


class TopDown:
    """The map from above, north up, with the flight so far. A strip below it shows the altitude along the way."""

    def __init__(self, ceiling: float):
        self._ceiling = ceiling
        self._relief: Floats = np.zeros((SIDE, SIDE, 3))
        self._heights: Heights | None = None

    def draw(self, heights: Heights, path: Floats, seen: NDArray[np.bool_] | None, goal: Floats | None) -> Picture:
        """`path` is [steps, 3]; `seen` has one cell per square metre, [y, x]. `seen` and `goal` may be None."""
        # The relief is the same for all pictures of an episode.
        if self._heights is None or not np.array_equal(self._heights, heights):
            self._heights, self._relief = heights, _enlarge(shaded_relief(heights))
        chart = self._relief.copy()
        if seen is not None:
            side = SIDE // len(seen)
            chart = _fog(chart, seen.repeat(side, 0).repeat(side, 1))
        if goal is not None:
            _disc(chart, goal, 6.0, (255, 255, 255))
            _disc(chart, goal, 4.5, GOAL_COLOUR)
        _trace(chart, path)
        _disc(chart, path[-1], 5.5, (255, 255, 255))
        _disc(chart, path[-1], 4.0, DRONE_COLOUR)
        # Upside down: row 0 of the map is the south, and row 0 of a picture its upper edge.
        return np.concatenate([chart[::-1].astype(np.uint8), self._strip(heights, path)])

    def _strip(self, heights: Heights, path: Floats) -> Picture:
        along = path[np.linspace(0, len(path) - 1, SIDE).round().astype(int)]
        column, row = np.clip(((along[:, :2] + HALF_METRES) / GRID_METRES).round().astype(int), 0, len(heights) - 1).T
        per_metre = (STRIP - 6) / self._ceiling
        ground, flight = heights[row, column] * per_metre, along[:, 2] * per_metre
        level = np.arange(STRIP)[::-1, None]
        strip = np.full((STRIP, SIDE, 3), (226, 236, 246), np.uint8)
        strip[level[:, 0] > self._ceiling * per_metre] = (120, 130, 145)
        strip[level <= ground] = (140, 115, 92)
        # In each column the line is as tall as the drone climbs there, so that it has no gaps.
        before = np.concatenate([flight[:1], flight[:-1]])
        strip[(level >= np.minimum(flight, before) - 1) & (level <= np.maximum(flight, before) + 1)] = DRONE_COLOUR
        strip[:2] = 40
        return strip


def _enlarge(colours: Floats) -> Floats:
    """Interpolate linearly from the points of the grid to pixels."""
    places = (np.arange(SIDE) + 0.5) / PIXELS_PER_METRE / GRID_METRES
    low = np.minimum(places.astype(int), len(colours) - 2)
    share = (places - low)[:, None, None]
    rows = colours[low] * (1 - share) + colours[low + 1] * share
    share = share.reshape(1, -1, 1)
    enlarged: Floats = rows[:, low] * (1 - share) + rows[:, low + 1] * share
    return enlarged


def _pixels(places: Floats) -> Floats:
    return (np.asarray(places)[..., :2] + HALF_METRES) * PIXELS_PER_METRE


def _disc(chart: Floats, place: Floats, radius: float, colour: tuple[int, int, int]) -> None:
    x, y = _pixels(place)
    row, column = np.ogrid[:SIDE, :SIDE]
    chart[(column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2 <= radius**2] = colour


def _trace(chart: Floats, path: Floats) -> None:
    """Draw the path three pixels wide, bright at its end and darker where it was flown long ago."""
    if len(path) < 2:
        return
    points = _pixels(path)
    steps = np.linspace(0, len(points) - 1, 4 * len(points))
    column, row = (np.interp(steps, np.arange(len(points)), points[:, k]) for k in (0, 1))
    strength = (0.55 + 0.45 * steps / steps[-1])[:, None]
    for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)):
        x, y = np.clip(column + dx, 0, SIDE - 1).astype(int), np.clip(row + dy, 0, SIDE - 1).astype(int)
        chart[y, x] = strength * PATH_COLOUR


def picture_3d(
    file: Path, heights: Heights, path: Floats, seen: NDArray[np.bool_] | None = None, title: str = ""
) -> Path:
    """Draw a flight [steps, 3] over its terrain and write it to `file` (.png, .pdf or .svg)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("a picture in 3-D needs matplotlib: pip install 'freerun[bench]'") from None
    colours = shaded_relief(heights)
    if seen is not None:
        points = np.minimum((np.arange(len(heights)) * GRID_METRES).astype(int), len(seen) - 1)
        colours = _fog(colours, seen[np.ix_(points, points)])
    x, y = np.meshgrid(*[np.linspace(-HALF_METRES, HALF_METRES, len(heights))] * 2)
    x_path, y_path, z_path = np.asarray(path).T

    figure = Figure(figsize=(9.0, 6.0), dpi=120)
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((-0.05, -0.02, 1.08, 1.08), projection="3d", computed_zorder=False)
    surface = {"rstride": 1, "cstride": 1, "shade": False, "antialiased": False, "linewidth": 0, "zorder": 1}
    axes.plot_surface(x, y, heights, facecolors=colours / 255.0, **surface)
    column, row = np.clip(((np.asarray(path)[:, :2] + HALF_METRES) / GRID_METRES).astype(int), 0, len(heights) - 1).T
    axes.plot(x_path, y_path, heights[row, column] + 0.1, color="black", alpha=0.6, linewidth=1.0, zorder=2)
    axes.plot(x_path, y_path, z_path, color=tuple(c / 255 for c in PATH_COLOUR), linewidth=2.0, zorder=3)
    axes.scatter(*path[0], color="white", edgecolor="black", s=30, depthshade=False, zorder=4)
    axes.scatter(
        *path[-1], color=tuple(c / 255 for c in DRONE_COLOUR), edgecolor="white", s=50, depthshade=False, zorder=4
    )
    axes.set(xlabel="x (m)", ylabel="y (m)", zlim=(0.0, 8.0), zticks=(0, 4, 8))
    axes.text2D(0.5, 0.9, title, transform=axes.transAxes, ha="center", fontsize=12)
    axes.set_box_aspect((1.0, 1.0, 0.25), zoom=1.05)
    axes.view_init(elev=42, azim=-60)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    return file
