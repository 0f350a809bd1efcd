"""The policy that workers run for images: a small CNN in numpy.

For one image it takes less time than torch (`benchmarks/image_actors.py`), and workers do without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from freerun.algorithms.policies.action_heads import Gaussian, SingleAct, mask_logits, with_preparation
from freerun.algorithms.policies.image_layers import (
    CONV_PLANS,
    ConvPlan,
    conv_layout,
    has_channels_first,
    other_columns,
    padded,
    size_and_channels,
)
from freerun.algorithms.policies.mlp_actor import (
    NORMALIZED_LIMIT,
    ActorSpec,
    activation_function,
    flat_size,
    named_views,
)
from freerun.core import Array, Decision, EnvSpec, FloatArray, ImagePart, Policy, TensorActor, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn


class _Convolution:
    """One layer on one image, as a matrix product: each row of the matrix is what the kernel sees at one place."""

    def __init__(self, x: FloatArray, weight: FloatArray, bias: FloatArray, stride: int):
        """`x` is the layer's input [height, width, channels], which others fill."""
        num_out, _, kernel, _ = weight.shape
        height, width = ((size - kernel) // stride + 1 for size in x.shape[:2])
        seen = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(0, 1))[::stride, ::stride]
        # [height, width, kernel, kernel, channels], without a copy
        self._seen = seen.transpose(0, 1, 3, 4, 2)
        self._columns = np.empty(self._seen.shape, np.float32)
        self._matrix = self._columns.reshape(height * width, -1)
        self._source, self._bias = weight, bias
        self._weight = np.empty((self._matrix.shape[1], num_out), np.float32)
        self.output = np.empty((height, width, num_out), np.float32)
        self._output = self.output.reshape(height * width, num_out)

    def refresh(self) -> None:
        """Take over the weights, [outputs, channels, kernel, kernel], in the order of the matrix's columns."""
        self._weight[...] = self._source.transpose(2, 3, 1, 0).reshape(self._weight.shape)

    def __call__(self) -> None:
        output = self._output
        np.copyto(self._columns, self._seen)
        np.dot(self._matrix, self._weight, out=output)
        output += self._bias
        np.maximum(output, np.float32(0), out=output)


class _Encoder:
    """The convolutions of one image. All memory of a forward pass is allocated here, once."""

    def __init__(self, image: ImagePart, plan: ConvPlan, arrays: Mapping[str, FloatArray], name: str):
        height, width, channels = size_and_channels(image.shape)
        self._image = image
        self._order = (1, 2, 0) if has_channels_first(image.shape) else (0, 1, 2)
        # Zeros stay where the image is padded.
        x = np.zeros((padded(height, plan.layers), padded(width, plan.layers), channels), np.float32)
        self._pixels = x[:height, :width]
        self._layers = []
        for index, layer in enumerate(plan.layers):
            weight, bias = (arrays[f"{name}.convolutions.{index}.{part}"] for part in ("weight", "bias"))
            self._layers.append(_Convolution(x, weight, bias, layer.stride))
            x = self._layers[-1].output
        self._convolved = x.reshape(-1)
        self._weight, self._bias = arrays[f"{name}.linear.weight"], arrays[f"{name}.linear.bias"]
        # Where the normaliser of observations is in use, its scale of a pixel is the same number.
        self._scale = np.float32(1.0 / image.highest)
        self.num_features = plan.num_features

    def refresh(self) -> None:
        for layer in self._layers:
            layer.refresh()

    def __call__(self, row: Array, features: FloatArray) -> None:
        """Write the features of the image in a flat row."""
        pixels = row[self._image.start : self._image.stop].reshape(self._image.shape).transpose(self._order)
        np.multiply(pixels, self._scale, out=self._pixels)
        for layer in self._layers:
            layer()
        np.dot(self._weight, self._convolved, out=features)
        features += self._bias
        np.maximum(features, np.float32(0), out=features)


class CNNActor:
    """A `Policy` whose weights are views into one flat buffer, as those of `MLPActor` are."""

    def __init__(self, spec: ActorSpec, images: tuple[ImagePart, ...], network: str, scalar_actions: bool):
        self.spec, self._images, self._network = spec, images, network
        self._scalar_actions = scalar_actions
        self._head = spec.make_head(scalar_actions)
        self.head_size = self._head.size
        self.draw = self._head.draw
        self.decide = self._head.decide
        self.log_prob = self._head.log_prob
        layout = self._layout()
        self.weights: FloatArray = np.zeros(flat_size(layout), np.float32)
        self.arrays: dict[str, FloatArray] = named_views(self.weights, layout)
        plan = CONV_PLANS[network]
        names = [f"trunk.encoders.{number}" for number in range(len(images))]
        self._encoders = [_Encoder(image, plan, self.arrays, name) for image, name in zip(images, names, strict=True)]
        self._others = other_columns(images, spec.obs_size)
        num_layers = len(spec.hidden_sizes) + 1
        self._layers = [
            (self.arrays[f"head.{2 * layer}.weight"], self.arrays[f"head.{2 * layer}.bias"])
            for layer in range(num_layers)
        ]
        self._features = np.empty(self._layers[0][0].shape[1], np.float32)
        self._activate = activation_function(spec.activation)
        self._refresh()

    def _layout(self) -> dict[str, tuple[int, ...]]:
        spec = self.spec
        arrays: dict[str, tuple[int, ...]] = {}
        if spec.normalize_obs:
            arrays = {"obs_mean": (spec.obs_size,), "obs_scale": (spec.obs_size,)}
        plan = CONV_PLANS[self._network]
        arrays |= conv_layout(self._images, spec.obs_size, plan, spec.hidden_sizes, spec.output_size)
        if spec.gaussian_size:
            arrays["log_std"] = (spec.gaussian_size,)
        return arrays

    def on(self, device: torch.device, seed: int) -> TensorActor:
        from freerun.algorithms.policies.device_actor import DeviceActor  # workers do not import torch

        return DeviceActor(self.spec, self.torch_network(), self.arrays, self._scalar_actions, device, seed)

    def batched_on(self, device: str) -> Policy:
        from freerun.algorithms.policies.batched_actor import BatchedActor  # workers do not import torch

        return BatchedActor(self, device)

    def torch_network(self) -> nn.Module:
        """Return a copy of the network in torch, for export: normalised observations -> outputs."""
        from freerun.algorithms.policies.image_networks import network_from

        return network_from(self._network, self._images, self.spec, self.arrays)

    def describe(self) -> dict[str, Any]:
        images = [[image.start, list(image.shape), image.highest] for image in self._images]
        own = {"kind": "cnn", "network": self._network, "images": images, "scalar_actions": self._scalar_actions}
        return {**own, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any]) -> CNNActor:
        """A policy from what `arrays` and `describe` of another one have returned."""
        fields = {name: value for name, value in description.items() if name != "kind"}
        network, scalar_actions = fields.pop("network"), bool(fields.pop("scalar_actions"))
        images = tuple(map(ImagePart.read, fields.pop("images")))
        if network not in CONV_PLANS:
            raise UserError(f"the policy has a network that this version of freerun does not know: {network!r}")
        actor = cls(ActorSpec.read(fields), images, network, scalar_actions)
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != {name: array.shape for name, array in actor.arrays.items()}:
            raise UserError(f"the policy's arrays {shapes} do not fit its description")
        actor.load(np.concatenate([arrays[name].reshape(-1) for name in actor.arrays]))
        return actor

    def fits(self, env: EnvSpec) -> bool:
        """True if it takes the observations of an environment and chooses its actions."""
        return self.spec.fits(env) and env.images == self._images

    def __getstate__(self) -> tuple[Any, ...]:
        # Views cannot be pickled; `__init__` makes them again.
        return self.spec, self._images, self._network, self._scalar_actions, self.weights

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *arguments, weights = state
        self.__init__(*arguments)  # type: ignore[misc]
        self.load(weights)

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        self._refresh()

    def _refresh(self) -> None:
        """Bring everything up to date that depends on the weights."""
        for encoder in self._encoders:
            encoder.refresh()
        if isinstance(self._head, Gaussian):
            self._head.load(self.arrays["log_std"])

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        # One image after another: the products of several are hardly faster, and an action has the same bits however
        # many environments share the call.
        output = np.empty((len(obs), self.spec.output_size), np.float32)
        for row, row_output in zip(obs, output, strict=True):
            self._forward(row, row_output)
        return self._head.decide(output, noise)

    def single(self) -> SingleAct:
        return self._head.single(with_preparation(self._forward, self._head))

    def _forward(self, obs: Array, output: FloatArray) -> None:
        """One observation -> the outputs."""
        row = obs.reshape(-1)
        x, start = self._features, 0
        for encoder in self._encoders:
            stop = start + encoder.num_features
            encoder(row, x[start:stop])
            start = stop
        for columns in self._others:
            stop = start + columns.stop - columns.start
            self._read_others(row, columns, x[start:stop])
            start = stop
        last = len(self._layers) - 1
        for layer, (weight, bias) in enumerate(self._layers):
            x = weight.dot(x)
            x += bias
            if layer < last:
                self._activate(x, out=x)
        output[...] = x
        if self.spec.has_mask:
            mask_logits(output, row)

    def _read_others(self, row: Array, columns: slice, x: FloatArray) -> None:
        """The numbers that are no pixels: clip((x - mean) / std) where they are normalised; `obs_scale` is 1 / std."""
        x[...] = row[columns]
        if self.spec.normalize_obs:
            x -= self.arrays["obs_mean"][columns]
            x *= self.arrays["obs_scale"][columns]
            np.clip(x, -NORMALIZED_LIMIT, NORMALIZED_LIMIT, out=x)
