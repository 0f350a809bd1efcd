"""Observations that are images: how they are found, and what to tell a user whose policy is an MLP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

NUM_IMAGE_DIMENSIONS = 3
"""Rows, columns and channels. A stack of frames has more."""
IMAGE_ADVICE = (
    "give a network of your own, such as a CNN, with --network (docs/own_networks.md), "
    "or wrap the environment so that it returns features instead of pixels"
)


def image_shape(space: spaces.Space[Any]) -> tuple[int, ...] | None:
    """The shape of the image that an observation is or contains; None if there is none."""
    if isinstance(space, spaces.Box):
        is_image = space.dtype == np.uint8 and len(space.shape) >= NUM_IMAGE_DIMENSIONS
        return space.shape if is_image else None
    parts: list[Any] = []
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        parts = list(space.spaces)
    return next((shape for part in parts if (shape := image_shape(part)) is not None), None)


def images_go_raw(shape: tuple[int, ...]) -> str:
    """The sentence that tells the user how an MLP gets images of this shape."""
    return (
        f"observations hold uint8 images of shape {shape}, and the default policy is an MLP: it gets their "
        f"{math.prod(shape):,} pixels flattened into one row and unscaled (0 to 255)"
    )
