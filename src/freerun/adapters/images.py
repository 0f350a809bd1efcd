"""Observations that are images or contain some: where they are, and what to tell a user whose policy is an MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from freerun.core import ImagePart

NUM_IMAGE_DIMENSIONS = 3
"""Rows, columns and channels. A stack of images that have channels of their own has more: no network here takes it."""
IMAGE_ADVICE = (
    "give a network of your own, such as a CNN, with --network (docs/own_networks.md), "
    "or wrap the environment so that it returns features instead of pixels"
)


def image_shape(space: spaces.Space[Any]) -> tuple[int, ...] | None:
    """The shape of the image, or of the stack of images, that an observation is or contains; None if there is none."""
    shapes = (leaf.shape for leaf in _leaves(space) if _holds_pixels(leaf))
    return next(shapes, None)


def image_parts(space: spaces.Space[Any]) -> tuple[ImagePart, ...]:
    """The images that a CNN can take, and where they stand in an observation once Gymnasium has flattened it."""
    found, start = [], 0
    for leaf in _leaves(space):
        if _holds_pixels(leaf) and len(leaf.shape) == NUM_IMAGE_DIMENSIONS:
            height, width, channels = leaf.shape
            found.append(ImagePart(start, (height, width, channels), float(leaf.high.max())))
        start += spaces.flatdim(leaf)
    return tuple(found)


def has_unknown_images(space: spaces.Space[Any]) -> bool:
    """True if there are pixels in an observation that no network of freerun's takes for an image."""
    return sum(map(_holds_pixels, _leaves(space))) > len(image_parts(space))


def _leaves(space: spaces.Space[Any]) -> Iterator[Any]:
    """The parts of an observation that are no Dict or Tuple, in the order in which Gymnasium flattens them."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            yield from _leaves(part)
    else:
        yield space


def _holds_pixels(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= NUM_IMAGE_DIMENSIONS


def images_go_raw(shape: tuple[int, ...]) -> str:
    """The sentence that tells the user how an MLP gets images of this shape."""
    return (
        f"observations hold uint8 images of shape {shape}, and the policy is an MLP: it gets their "
        f"{math.prod(shape):,} pixels flattened into one row and unscaled (0 to 255)"
    )
