"""Torch networks for images: a CNN for each image, and one head for their features and all other numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freerun.algorithms.policies.image_layers import (
    CONV_PLANS,
    IMPALA,
    ConvPlan,
    has_channels_first,
    num_others,
    other_columns,
    output_size,
    padded,
    size_and_channels,
)
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import TrunkNetwork, mlp, traceable
from freerun.core import EnvSpec, FloatArray, ImagePart

IMPALA_CHANNELS, IMPALA_FEATURES = (16, 32, 32), 256
"""The larger network of Espeholt et al. 2018 ("IMPALA"), without its LSTM."""


class ConvEncoder(nn.Module):
    """The convolutions of a `ConvPlan`: [N, channels, height, width] -> [N, features]."""

    def __init__(self, height: int, width: int, num_channels: int, plan: ConvPlan):
        super().__init__()
        self.num_features = plan.num_features
        self._padding = (0, padded(width, plan.layers) - width, 0, padded(height, plan.layers) - height)
        convolutions = []
        for layer in plan.layers:
            convolutions.append(nn.Conv2d(num_channels, layer.num_channels, layer.kernel, layer.stride))
            num_channels = layer.num_channels
        self.convolutions = nn.ModuleList(convolutions)
        num_inputs = output_size(height, plan.layers) * output_size(width, plan.layers) * num_channels
        self.linear = nn.Linear(num_inputs, plan.num_features)

    def forward(self, image: Tensor) -> Tensor:
        if any(self._padding):
            image = nn.functional.pad(image, self._padding)
        for convolution in self.convolutions:
            image = convolution(image).relu()
        # Channels last, as numpy's convolutions leave them: so the workers take the weights as they are.
        return self.linear(image.permute(0, 2, 3, 1).flatten(1)).relu()  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), with as many channels as before."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.first = nn.Conv2d(num_channels, num_channels, 3, padding=1)
        self.second = nn.Conv2d(num_channels, num_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.relu()).relu())  # type: ignore[no-any-return]


class ImpalaEncoder(nn.Module):
    """IMPALA's residual network: [N, channels, height, width] -> [N, features]."""

    num_features = IMPALA_FEATURES

    def __init__(self, height: int, width: int, num_channels: int):
        super().__init__()
        stages: list[nn.Module] = []
        for num_out in IMPALA_CHANNELS:
            pool = nn.MaxPool2d(3, stride=2, padding=1)
            stages += [nn.Conv2d(num_channels, num_out, 3, padding=1), pool, ResidualBlock(num_out)]
            stages.append(ResidualBlock(num_out))
            num_channels = num_out
            height, width = (height + 1) // 2, (width + 1) // 2  # the pooling rounds up
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(height * width * num_channels, IMPALA_FEATURES)

    def forward(self, image: Tensor) -> Tensor:
        return self.linear(self.stages(image).relu().flatten(1)).relu()  # type: ignore[no-any-return]


class ImageTrunk(nn.Module):
    """Rows of numbers, some of them pixels -> the features of each image, and the other numbers as they are."""

    def __init__(self, network: str, images: tuple[ImagePart, ...], obs_size: int, is_scaled: bool):
        """With `is_scaled`, the normaliser of observations has divided the pixels already."""
        super().__init__()
        self._images = images
        self._scales = [1.0 if is_scaled else 1.0 / image.highest for image in images]
        self._others = other_columns(images, obs_size)
        encoders = [_encoder(network, *size_and_channels(image.shape)) for image in images]
        self.encoders = nn.ModuleList(encoders)
        self.num_features = sum(encoder.num_features for encoder in encoders) + num_others(images, obs_size)

    def forward(self, rows: Tensor) -> Tensor:
        parts = []
        for image, scale, encoder in zip(self._images, self._scales, self.encoders, strict=True):
            pixels = rows[:, image.start : image.stop].reshape(-1, *image.shape)
            pixels = pixels if has_channels_first(image.shape) else pixels.permute(0, 3, 1, 2)
            if rows.device.type == "cpu":
                # With channels last in memory, a gradient step of the Nature CNN takes a quarter less time there.
                # Bytes are put into that order faster than floats.
                pixels = pixels.contiguous(memory_format=torch.channels_last)
            # Bytes become floats only here, minibatch by minibatch.
            parts.append(encoder(pixels.float() * scale))
        parts += [rows[:, columns].float() for columns in self._others]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _encoder(network: str, height: int, width: int, num_channels: int) -> ImpalaEncoder | ConvEncoder:
    if network == IMPALA:
        return ImpalaEncoder(height, width, num_channels)
    return ConvEncoder(height, width, num_channels, CONV_PLANS[network])


def image_networks(
    network: str | None, env: EnvSpec, spec: ActorSpec, hidden_sizes: tuple[int, ...]
) -> tuple[nn.Module, nn.Module]:
    """The networks of the policy and of the value function. `hidden_sizes` are those of a critic without images."""
    assert network is not None  # there are images only where there is a network for them
    policy = image_network(network, env, spec)
    return policy, value_network(env, spec, policy, hidden_sizes)


def image_network(network: str, env: EnvSpec, spec: ActorSpec) -> TrunkNetwork:
    """The policy's network, of one of the kinds of `IMAGE_NETWORKS`, with orthogonal weights and zero biases."""
    trunk = ImageTrunk(network, env.images, spec.obs_size, is_scaled=spec.normalize_obs)
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return TrunkNetwork(trunk, mlp((trunk.num_features, *spec.hidden_sizes, spec.output_size), spec.activation, 0.01))


def value_network(env: EnvSpec, spec: ActorSpec, policy: TrunkNetwork, hidden_sizes: tuple[int, ...]) -> nn.Module:
    """The value function's network: the policy's convolutions with a head of its own, as in most work on Atari.

    A value function that sees another group of observations shares nothing and is an MLP with these hidden layers."""
    if env.has_critic_group:
        return mlp((spec.critic_obs_size, *hidden_sizes, 1), spec.activation, 1.0)
    trunk = policy.trunk
    assert isinstance(trunk, ImageTrunk)
    return TrunkNetwork(trunk, mlp((trunk.num_features, *spec.hidden_sizes, 1), spec.activation, 1.0))


def network_from(
    network: str, images: tuple[ImagePart, ...], spec: ActorSpec, arrays: Mapping[str, FloatArray]
) -> TrunkNetwork:
    """The network of a policy that workers run in numpy, from its arrays. It can be traced."""
    trunk = ImageTrunk(network, images, spec.obs_size, is_scaled=spec.normalize_obs)
    made = TrunkNetwork(trunk, mlp((trunk.num_features, *spec.hidden_sizes, spec.output_size), spec.activation, 1.0))
    made.load_state_dict({name: torch.from_numpy(arrays[name].copy()) for name in made.state_dict()})
    made.head = traceable(made.head)
    return made
