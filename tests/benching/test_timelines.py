"""The pictures of who was busy when."""

from __future__ import annotations

import io

import numpy as np

from freerun.benching.timelines import COLORS, mixed, png
from freerun.core import Array, State


def cells(**seconds: float) -> Array:
    spent = np.zeros((1, 1, len(State)))
    for name, value in seconds.items():
        spent[0, 0, State[name]] = value
    return spent


def test_colours_mix_by_the_share_of_time() -> None:
    assert mixed(cells(BUSY=0.2))[0, 0].tolist() == [*COLORS["busy"][:3], 255]
    assert mixed(cells())[0, 0].tolist() == [0, 0, 0, 0]  # nothing is known
    # Half busy (opacity 1), half waiting (0.45): opacity 0.725, busy weighs 1 / 1.45 of the colour.
    red, green, blue, opacity = mixed(cells(BUSY=1.0, WAITING_FOR_WEIGHTS=1.0))[0, 0].tolist()
    assert (red, green, blue) == tuple(
        round((a + 0.45 * b) / 1.45) for a, b in zip(COLORS["busy"][:3], COLORS["waiting-for-weights"][:3], strict=True)
    )
    assert opacity == 185


def test_the_file_is_a_picture_of_those_pixels() -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as picture:
        assert np.array_equal(np.asarray(picture), pixels)
