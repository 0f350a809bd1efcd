"""Pictures of a flight over rough terrain, from above or in three dimensions, as arrays and fast enough for films.

The ground is drawn once for each episode. A frame then is a copy of it with the fog lifted from what has been seen
since the last frame, and with the path, the goal and the drone on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freerun.core import UserError
from freerun_envs.terrain import ARENA_METRES, GRID_METRES, HALF_METRES, Heights

Picture = NDArray[np.uint8]
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

PIXELS_PER_METRE = 8
SIDE = round(ARENA_METRES * PIXELS_PER_METRE)
STRIP = 72
"""The height of the altitude strip below the map, in pixels."""
GROUND_COLOURS = np.array([(62, 90, 66), (122, 138, 88), (186, 165, 118), (150, 122, 100), (236, 232, 226)], float)
"""The colours of the ground, from the lowest to the highest."""
FOG_COLOUR, FOG = np.array((48.0, 56.0, 78.0)), 0.62
"""The colour that is mixed over unseen ground, and its share."""
PATH_COLOUR, DRONE_COLOUR, GOAL_COLOUR, WHITE = (255, 214, 10), (230, 30, 60), (0, 170, 255), (255, 255, 255)
SKY_COLOUR, WALL_COLOUR = (208, 224, 240), (104, 86, 72)
SUN = np.array([-0.5, 0.5, 0.7]) / np.linalg.norm([-0.5, 0.5, 0.7])
"""The unit vector to the sun, which stands in the north-west, as on maps."""
SHADOW = 0.5
"""The share of its light that the ground beneath the path keeps."""
SAMPLES_PER_STEP = 4
"""Points that are drawn between two positions. At 30 m/s a step is 5 pixels long, and a point is 3 pixels wide."""
BRUSH = (-1, 1, 0, 0, 0), (0, 0, -1, 1, 0)
"""The pixels around each point that the path covers: columns and rows."""
WIDTH_3D, HEIGHT_3D = 560, 360
CAMERA, TARGET, ZOOM = np.array([-22.0, -44.0, 34.0]), np.array([0.0, -5.5, 0.0]), 510.0
"""Where the camera of the 3-D view stands, what is in the middle of its picture (in metres), and pixels per radian."""
POINTS_PER_GRID = 6
"""The 3-D view draws the ground as this many points along each side of a square of the grid, half a pixel apart."""


class View(NamedTuple):
    """The ground of one episode as a picture, and where places of the arena are in it."""

    clear: Picture
    """[rows, columns, 3]: without fog."""
    cell: Numbers
    """[rows, columns]: the number of the ground's cell of 1 m² (row · 40 + column) at each pixel, or −1."""
    distance: Floats
    """[rows, columns]: from the camera to what is seen at each pixel."""
    project: Callable[[Floats], Floats]
    """Turns places [..., 3] into columns, rows and distances from the camera, [..., 3]."""
    has_strip: bool
    """Whether the altitude needs a picture of its own."""


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


def view_from_above(heights: Heights) -> View:
    """The map, north up."""
    middles = (np.arange(SIDE) + 0.5) / PIXELS_PER_METRE
    # Upside down: row 0 of the map is the south, and row 0 of a picture its upper edge.
    clear = np.ascontiguousarray(_interpolate(shaded_relief(heights), middles / GRID_METRES)[::-1].astype(np.uint8))
    cell = _cell_numbers(*np.meshgrid(middles - HALF_METRES, -(middles - HALF_METRES)))

    def project(places: Floats) -> Floats:
        x, y = places[..., 0] + HALF_METRES, HALF_METRES - places[..., 1]
        return np.stack([x * PIXELS_PER_METRE, y * PIXELS_PER_METRE, np.zeros_like(x)], -1)

    return View(clear, cell, np.zeros((SIDE, SIDE)), project, True)


def view_in_3d(heights: Heights) -> View:
    """The ground from a camera in the south that looks down on it."""
    forward = (TARGET - CAMERA) / np.linalg.norm(TARGET - CAMERA)
    right = np.cross(forward, (0.0, 0.0, 1.0))
    right /= np.linalg.norm(right)
    axes = np.stack([right, np.cross(forward, right), forward], -1)  # the second points down, as a picture's rows do

    def project(places: Floats) -> Floats:
        across, down, distance = np.moveaxis((places - CAMERA) @ axes, -1, 0)
        # A pinhole camera: pixels from the middle = zoom · sideways / distance.
        column, row = WIDTH_3D / 2 + ZOOM * across / distance, HEIGHT_3D / 2 + ZOOM * down / distance
        return np.stack([column, row, distance], -1)

    along = np.linspace(0.0, len(heights) - 1.0, POINTS_PER_GRID * (len(heights) - 1) + 1)
    x, y = np.meshgrid(along * GRID_METRES - HALF_METRES, along * GRID_METRES - HALF_METRES)
    ground = np.stack([x, y, _interpolate(heights[..., None].astype(float), along)[..., 0]], -1)
    colours = _interpolate(shaded_relief(heights), along)
    # The ground is cut off at the edges that face the camera: walls from 1 m below the lowest ground up to the edge.
    edges = np.concatenate([ground[0], ground[:, 0]])
    share = np.linspace(0.0, 1.0, 100)[:, None]
    walls = np.stack(
        [np.broadcast_to(edges[:, k], (100, len(edges))) for k in (0, 1)] + [share * (edges[:, 2] + 1) - 1], -1
    )

    places = np.concatenate([ground.reshape(-1, 3), walls.reshape(-1, 3)])
    painted = np.concatenate([colours.reshape(-1, 3), np.broadcast_to(WALL_COLOUR, (walls[..., 0].size, 3))])
    cells = np.concatenate([_cell_numbers(x, y).ravel(), np.full(walls[..., 0].size, -1)])
    column, row, distance = np.moveaxis(project(places), -1, 0)
    is_inside = (column >= 0) & (column < WIDTH_3D) & (row >= 0) & (row < HEIGHT_3D)
    # Painter's algorithm: from far to near, so that the nearest point of each pixel is the last to be written.
    order = np.argsort(-distance)
    order = order[is_inside[order]]
    pixel = row[order].astype(int) * WIDTH_3D + column[order].astype(int)
    clear = np.full((HEIGHT_3D * WIDTH_3D, 3), SKY_COLOUR, np.uint8)
    cell, nearest = np.full(len(clear), -1), np.full(len(clear), np.inf)
    clear[pixel], cell[pixel], nearest[pixel] = painted[order], cells[order], distance[order]
    shape = HEIGHT_3D, WIDTH_3D
    return View(clear.reshape(*shape, 3), cell.reshape(shape), nearest.reshape(shape), project, False)


VIEWS: dict[str, Callable[[Heights], View]] = {"above": view_from_above, "3d": view_in_3d}


class FlightPicture:
    """The pictures of one episode. Each call of `draw` goes on where the last one ended."""

    def __init__(self, view: str, heights: Heights, ceiling: float):
        self._heights, self._ceiling = heights, ceiling
        self._view = find_view(view)(heights)
        self._ground = self._view.clear.copy()
        self._hidden: NDArray[np.bool_] | None = None
        """Which cells are still under fog; None before the first picture."""
        cells = self._view.cell.ravel()
        self._by_cell = np.argsort(cells, kind="stable")
        self._cell_ends = np.searchsorted(cells[self._by_cell], np.arange(round(ARENA_METRES) ** 2 + 1))
        self._num_drawn = 0
        self._path, self._shadow = (np.zeros(0, int) for _ in range(2))
        """The pixels that the path so far covers, and in 3-D those of its shadow."""
        self._path_steps: Numbers = np.zeros(0, int)
        """The step in which each pixel of the path was flown over."""

    def draw(self, path: Floats, seen: NDArray[np.bool_] | None, goal: Floats | None) -> Picture:
        """`path` is [steps, 3]; `seen` has one cell per square metre, [y, x]. `seen` and `goal` may be None."""
        if seen is not None:
            self._lift_fog(seen)
        self._extend(path)
        picture = self._ground.copy()
        flat = picture.reshape(-1, 3)
        flat[self._shadow] = (flat[self._shadow] * SHADOW).astype(np.uint8)
        # Bright at its end and darker where it was flown long ago.
        strength = 0.55 + 0.45 * self._path_steps / max(1, len(path))
        flat[self._path] = (strength[:, None] * PATH_COLOUR).astype(np.uint8)
        if goal is not None:
            self._mark(picture, goal, GOAL_COLOUR, 4.5)
        self._mark(picture, path[-1], DRONE_COLOUR, 4.0)
        return np.concatenate([picture, self._strip(path)]) if self._view.has_strip else picture

    def _lift_fog(self, seen: NDArray[np.bool_]) -> None:
        if self._hidden is None:
            self._hidden = np.ones(seen.size, bool)
            fogged = self._view.clear * (1 - FOG) + FOG_COLOUR * FOG
            self._ground = np.where(self._view.cell[..., None] >= 0, fogged, self._view.clear).astype(np.uint8)
        new = np.flatnonzero(seen.ravel() & self._hidden)
        self._hidden[new] = False
        for cell in new:
            pixels = self._by_cell[self._cell_ends[cell] : self._cell_ends[cell + 1]]
            self._ground.reshape(-1, 3)[pixels] = self._view.clear.reshape(-1, 3)[pixels]

    def _extend(self, path: Floats) -> None:
        """Draw what was flown since the last picture."""
        first = max(0, self._num_drawn - 1)
        if len(path) <= first + 1:
            return
        steps = np.linspace(first, len(path) - 1, SAMPLES_PER_STEP * (len(path) - 1 - first) + 1)
        numbers = np.arange(first, len(path))
        places = np.stack([np.interp(steps, numbers, path[first:, k]) for k in range(3)], -1)
        pixels, shown = self._pixels_of(places)
        self._path = np.concatenate([self._path, pixels])
        self._path_steps = np.concatenate([self._path_steps, steps.astype(int).repeat(len(BRUSH[0]))[shown]])
        if not self._view.has_strip:
            on_ground = self._pixels_of(self._beneath(places))[0]
            # Each pixel once, so that none gets darker where the path crosses itself.
            self._shadow = np.union1d(self._shadow, on_ground)
        self._num_drawn = len(path)

    def _pixels_of(self, places: Floats) -> tuple[Numbers, NDArray[np.bool_]]:
        """The pixels that the brush covers at these places, and which of places × brush are not behind a hill."""
        column, row, distance = np.moveaxis(self._view.project(places), -1, 0)
        num_rows, num_columns = self._view.cell.shape
        columns = np.clip(np.add.outer(column, BRUSH[0]), 0, num_columns - 1).astype(int).ravel()
        rows = np.clip(np.add.outer(row, BRUSH[1]), 0, num_rows - 1).astype(int).ravel()
        # The ground's own points are half a metre apart at most from what is drawn on them.
        shown = distance.repeat(len(BRUSH[0])) <= self._view.distance[rows, columns] + 0.5
        return (rows * num_columns + columns)[shown], shown

    def _beneath(self, places: Floats) -> Floats:
        column, row = np.clip(
            ((places[:, :2] + HALF_METRES) / GRID_METRES).round().astype(int), 0, len(self._heights) - 1
        ).T
        return np.stack([places[:, 0], places[:, 1], self._heights[row, column]], -1)

    def _mark(self, picture: Picture, place: Floats, colour: tuple[int, int, int], radius: float) -> None:
        """A disc with a white rim; in 3-D also a line down to the ground."""
        column, row, _ = self._view.project(np.asarray(place, float))
        if not self._view.has_strip:
            foot = self._view.project(self._beneath(np.asarray(place, float)[None])[0])[1]
            low, high = sorted(np.clip((row, foot), 0, len(picture) - 1).astype(int))
            picture[low:high, int(np.clip(column, 0, picture.shape[1] - 1))] = WHITE
        reach = int(radius) + 3
        top, left = max(0, int(row) - reach), max(0, int(column) - reach)
        window = picture[top : max(0, int(row) + reach), left : max(0, int(column) + reach)]
        rows, columns = np.ogrid[: window.shape[0], : window.shape[1]]
        squared = (columns + left + 0.5 - column) ** 2 + (rows + top + 0.5 - row) ** 2
        window[squared <= (radius + 1.5) ** 2] = WHITE
        window[squared <= radius**2] = colour

    def _strip(self, path: Floats) -> Picture:
        """The altitude along the way, above the ground beneath it."""
        along = path[np.linspace(0, len(path) - 1, SIDE).round().astype(int)]
        per_metre = (STRIP - 6) / self._ceiling
        ground, flight = self._beneath(along)[:, 2] * per_metre, along[:, 2] * per_metre
        level = np.arange(STRIP)[::-1, None]
        strip = np.full((STRIP, SIDE, 3), (226, 236, 246), np.uint8)
        strip[level[:, 0] > self._ceiling * per_metre] = (120, 130, 145)
        strip[level <= ground] = (140, 115, 92)
        # In each column the line is as tall as the drone climbs there, so that it has no gaps.
        before = np.concatenate([flight[:1], flight[:-1]])
        strip[(level >= np.minimum(flight, before) - 1) & (level <= np.maximum(flight, before) + 1)] = DRONE_COLOUR
        strip[:2] = 40
        return strip


def find_view(name: str) -> Callable[[Heights], View]:
    if name not in VIEWS:
        raise UserError(f"RoughDrone has no view {name!r}: use {' or '.join(VIEWS)}")
    return VIEWS[name]


def _cell_numbers(x: Floats, y: Floats) -> Numbers:
    column, row = (np.clip((k + HALF_METRES).astype(int), 0, round(ARENA_METRES) - 1) for k in (x, y))
    numbers: Numbers = row * round(ARENA_METRES) + column
    return numbers


def _interpolate(values: Floats, places: Floats) -> Floats:
    """Values [y, x, ...] at all pairs of these places of the grid, linear between its points."""
    low = np.minimum(places.astype(int), len(values) - 2)
    share = (places - low)[:, None, None]
    rows = values[low] * (1 - share) + values[low + 1] * share
    share = share.reshape(1, -1, 1)
    found: Floats = rows[:, low] * (1 - share) + rows[:, low + 1] * share
    return found
