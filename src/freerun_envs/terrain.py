"""Rough ground: seeded height fields, the height of the ground at any place, and places where a drone may start."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ARENA_METRES = 40.0
HALF_METRES = ARENA_METRES / 2
GRID_METRES = 0.25
NUM_POINTS = round(ARENA_METRES / GRID_METRES) + 1
"""The number of grid points along each side. Heights are stored at these points and bilinear in between."""
RELIEF_METRES = 6.0
"""The difference between the highest and the lowest point of each field."""
OCTAVES = ((10.0, 1.0), (5.0, 0.7), (2.5, 0.5), (1.25, 0.3), (0.625, 0.12))
"""For each octave of the noise, the metres between its knots and its amplitude: first hills, at last rocks."""
START_MARGIN_METRES = 5.0
START_QUANTILE = 0.2
"""Episodes begin above the lowest fifth of the ground, at least the margin away from the edges."""
NUM_STARTS = 256
"""The number of starting places on each field."""

Heights = NDArray[np.float32]


class Terrain(NamedTuple):
    """K height fields on a device, over the same arena: x and y from −`HALF_METRES` to `HALF_METRES`."""

    heights: Tensor
    """[K, NUM_POINTS, NUM_POINTS], rows along y and columns along x."""
    corners: Tensor
    """[K · (NUM_POINTS − 1)², 4]: the heights at the corners (x, y) = (0, 0), (1, 0), (0, 1), (1, 1) of each square of
    the grid. One lookup instead of four makes `ground_height` faster."""
    starts: Tensor
    """[K · NUM_STARTS, 3]: places on the ground that episodes may start above."""


@functools.lru_cache(maxsize=4)
def make_terrain(seed: int, num_terrains: int, device: torch.device | str = "cpu") -> Terrain:
    """The height fields of a seed. They are drawn on the CPU, so that a seed gives the same ground on every device.

    Simulators with the same arguments share the result."""
    fields = [height_field(seed, number) for number in range(num_terrains)]
    heights = torch.from_numpy(np.stack(fields))
    squares = [heights[:, :-1, :-1], heights[:, :-1, 1:], heights[:, 1:, :-1], heights[:, 1:, 1:]]
    corners = torch.stack(squares, -1).reshape(-1, 4)
    starts = np.concatenate([_starts(field, seed, number) for number, field in enumerate(fields)])
    return Terrain(heights.to(device), corners.to(device), torch.from_numpy(starts).to(device))


def height_field(seed: int, number: int) -> Heights:
    """A sum of octaves of smooth noise, scaled to heights from 0 to `RELIEF_METRES`."""
    rng = np.random.default_rng((seed, number))
    along = np.linspace(0.0, ARENA_METRES, NUM_POINTS)
    total = np.zeros((NUM_POINTS, NUM_POINTS))
    for spacing, amplitude in OCTAVES:
        # Random heights at the knots, interpolated by splines along both axes: W @ knots @ W^T.
        weights = _spline_weights(along / spacing)
        total += amplitude * weights @ rng.standard_normal((weights.shape[1], weights.shape[1])) @ weights.T
    total -= total.min()
    field: Heights = (total * (RELIEF_METRES / total.max())).astype(np.float32)
    return field


def _spline_weights(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights [place, knot] of a cubic B-spline over knots at −1, 0, 1, …; its curvature is continuous."""
    # B(d) = 2/3 - d^2 + d^3/2 for d < 1, (2 - d)^3 / 6 for 1 <= d < 2, and 0 elsewhere, with d = |place - knot|
    knots = np.arange(-1, int(places.max()) + 3)
    distance = np.abs(places[:, None] - knots)
    inner = 2 / 3 - distance**2 + distance**3 / 2
    outer = (2 - distance) ** 3 / 6
    return np.where(distance < 1, inner, np.where(distance < 2, outer, 0.0))


def _starts(field: Heights, seed: int, number: int) -> Heights:
    """Draw the starting places (x, y, height) of a field."""
    margin = round(START_MARGIN_METRES / GRID_METRES)
    inner = field[margin:-margin, margin:-margin]
    rows, columns = np.nonzero(inner <= np.quantile(inner, START_QUANTILE))
    # The 1 makes it another stream than that of the heights, (seed, number).
    chosen = np.random.default_rng((seed, number, 1)).integers(len(rows), size=NUM_STARTS)
    rows, columns = rows[chosen] + margin, columns[chosen] + margin
    places = [columns * GRID_METRES - HALF_METRES, rows * GRID_METRES - HALF_METRES, field[rows, columns]]
    return np.stack(places, -1).astype(np.float32)


def ground_height(terrain: Terrain, number: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The height of field `number` at (x, y), bilinear; outside the arena, that of its edge. Arguments broadcast."""
    last = NUM_POINTS - 1
    column = ((x + HALF_METRES) / GRID_METRES).clamp(0.0, last)
    row = ((y + HALF_METRES) / GRID_METRES).clamp(0.0, last)
    left, low = column.floor().clamp(max=last - 1), row.floor().clamp(max=last - 1)
    square = (number * last + low.long()) * last + left.long()
    h00, h10, h01, h11 = terrain.corners[square].unbind(-1)
    right, up = column - left, row - low
    # Interpolate along x on both sides of the square, then between the two along y.
    near = torch.lerp(h00, h10, right)
    return torch.lerp(near, torch.lerp(h01, h11, right), up)


def grid_offsets(width: int, spacing: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """x (ahead) and y (to the left) of width² points around the origin. The first point is behind and to the right."""
    along = (torch.arange(width, device=device, dtype=torch.float32) - (width - 1) / 2) * spacing
    x, y = torch.meshgrid(along, along, indexing="xy")
    return x.flatten(), y.flatten()
