"""Which convolutions turn an image into features. The torch networks and the workers' numpy actor both follow this."""

from __future__ import annotations

import math
from typing import NamedTuple

from freerun.core import EnvSpec, ImagePart, UserError


class ConvLayer(NamedTuple):
    """A convolution without padding, and a ReLU after it."""

    num_channels: int
    kernel: int
    stride: int


class ConvPlan(NamedTuple):
    """Convolutions one after another, then a linear layer with a ReLU."""

    layers: tuple[ConvLayer, ...]
    num_features: int


# Mnih et al. 2015, "Human-level control through deep reinforcement learning".
NATURE = ConvPlan((ConvLayer(32, 8, 4), ConvLayer(64, 4, 2), ConvLayer(64, 3, 1)), 512)
SMALL = ConvPlan((ConvLayer(16, 3, 1), ConvLayer(32, 3, 2)), 128)
CONV_PLANS = {"nature": NATURE, "small-cnn": SMALL}
"""The networks that workers run in numpy, by the names that users give to --network."""
IMPALA = "impala"
IMAGE_NETWORKS = (*CONV_PLANS, IMPALA)
LEAST_NATURE_SIDE = 36
"""The smallest image that the Nature CNN's convolutions reduce to a single pixel. Smaller ones get `SMALL`."""
AUTO, MLP = "auto", "mlp"


def chosen_network(network: str | None, env: EnvSpec) -> str | None:
    """The network for an environment: a name of `IMAGE_NETWORKS`, one of the user's own, or None for an MLP."""
    if network == MLP:
        return None
    if network in IMAGE_NETWORKS and not env.images:
        raise UserError(
            f"--network {network} is for images, and this environment has none (a Box of uint8 with three dimensions): "
            "leave it out"
        )
    if network not in (None, AUTO):
        return network
    if not env.images:
        return None
    smallest = min(min(size_and_channels(image.shape)[:2]) for image in env.images)
    return "nature" if smallest >= LEAST_NATURE_SIDE else "small-cnn"


def has_channels_first(shape: tuple[int, int, int]) -> bool:
    """True for [channels, height, width].

    An image of which only two neighbouring sizes are equal is a square: that of a chess board may have more channels
    than pixels on a side. Otherwise there are fewer channels than pixels on a side."""
    first, second, third = shape
    if (first == second) != (second == third):
        return second == third
    return first < third


def size_and_channels(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The height, the width and the number of channels of an image."""
    first, second, third = shape
    return (second, third, first) if has_channels_first(shape) else (first, second, third)


def padded(size: int, layers: tuple[ConvLayer, ...]) -> int:
    """The smallest size, not below `size`, of which the strides of all layers reach every pixel.

    Zeros are added at the right and at the bottom. The 84 pixels of Atari need none."""
    while not _is_covered(size, layers):
        size += 1
    return size


def _is_covered(size: int, layers: tuple[ConvLayer, ...]) -> bool:
    for layer in layers:
        if size < layer.kernel or (size - layer.kernel) % layer.stride:
            return False
        size = (size - layer.kernel) // layer.stride + 1
    return True


def output_size(size: int, layers: tuple[ConvLayer, ...]) -> int:
    """The height or the width behind all layers."""
    size = padded(size, layers)
    for layer in layers:
        size = (size - layer.kernel) // layer.stride + 1
    return size


def other_columns(images: tuple[ImagePart, ...], obs_size: int) -> list[slice]:
    """The numbers of a row that are no pixels, in their order."""
    ends = [0, *(image.stop for image in images)]
    starts = [*(image.start for image in images), obs_size]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def num_others(images: tuple[ImagePart, ...], obs_size: int) -> int:
    return obs_size - sum(image.stop - image.start for image in images)


def has_other_numbers(images: tuple[ImagePart, ...], env: EnvSpec) -> bool:
    """True if the policy sees images and something else."""
    return bool(images) and num_others(images, math.prod(env.policy_space.shape)) > 0


def conv_layout(
    images: tuple[ImagePart, ...], obs_size: int, plan: ConvPlan, hidden_sizes: tuple[int, ...], num_outputs: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays of a network, in order: those of `image_networks.image_network`."""
    arrays: dict[str, tuple[int, ...]] = {}
    for number, image in enumerate(images):
        height, width, num_channels = size_and_channels(image.shape)
        for index, layer in enumerate(plan.layers):
            name = f"trunk.encoders.{number}.convolutions.{index}"
            arrays[f"{name}.weight"] = (layer.num_channels, num_channels, layer.kernel, layer.kernel)
            arrays[f"{name}.bias"] = (layer.num_channels,)
            num_channels = layer.num_channels
        num_inputs = output_size(height, plan.layers) * output_size(width, plan.layers) * num_channels
        arrays[f"trunk.encoders.{number}.linear.weight"] = (plan.num_features, num_inputs)
        arrays[f"trunk.encoders.{number}.linear.bias"] = (plan.num_features,)
    sizes = (len(images) * plan.num_features + num_others(images, obs_size), *hidden_sizes, num_outputs)
    for index in range(len(sizes) - 1):
        arrays[f"head.{2 * index}.weight"] = (sizes[index + 1], sizes[index])
        arrays[f"head.{2 * index}.bias"] = (sizes[index + 1],)
    return arrays
