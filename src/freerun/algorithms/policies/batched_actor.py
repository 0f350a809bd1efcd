"""A policy whose network runs on a device for a batch of observations, while everything else stays in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from freerun.algorithms.policies.action_heads import SingleAct, mask_logits
from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT
from freerun.core import Array, Decision, FloatArray, TensorActor

if TYPE_CHECKING:
    from freerun.algorithms.policies.cnn_actor import CNNActor
    from freerun.algorithms.policies.mlp_actor import MLPActor
    from freerun.algorithms.policies.torch_actor import TorchActor


class BatchedActor:
    """A `Policy` that chooses actions as the policy it is made from does, up to rounding.

    The network of that policy is copied to the device. Noise, distributions and masks are numpy's, so an action follows
    from the same seed. Bytes go to the device as bytes.
    """

    def __init__(self, actor: MLPActor | CNNActor | TorchActor, device: str):
        self._actor = actor
        self._device = torch.device(device)
        self._network = actor.torch_network().to(self._device).requires_grad_(False).eval()
        self.weights = actor.weights  # the same memory
        self.head_size = actor.head_size
        self.draw = actor.draw
        self.log_prob = actor.log_prob
        tensors = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
        self._copies = [(tensors[name], array) for name, array in actor.arrays.items() if name in tensors]
        self._normalizer = [
            (torch.empty(array.shape, device=self._device), array)
            for name, array in actor.arrays.items()
            if name in ("obs_mean", "obs_scale")
        ]
        self._refresh()

    @property
    def arrays(self) -> Mapping[str, FloatArray]:
        return self._actor.arrays

    def describe(self) -> dict[str, Any]:
        return self._actor.describe()

    def load(self, weights: FloatArray) -> None:
        self._actor.load(weights)
        self._refresh()

    def _refresh(self) -> None:
        for tensor, array in (*self._copies, *self._normalizer):
            tensor.copy_(torch.from_numpy(array))

    @torch.no_grad()
    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        rows = obs.reshape(len(obs), -1)
        x = torch.from_numpy(np.ascontiguousarray(rows[:, : self._actor.spec.obs_size])).to(self._device).float()
        if self._normalizer:
            (mean, _), (scale, _) = self._normalizer
            x = ((x - mean) * scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        output: FloatArray = self._network(x).cpu().numpy()
        if self._actor.spec.has_mask:
            mask_logits(output, rows)
        return self._actor.decide(output, noise)

    def single(self) -> SingleAct:
        return self._actor.single()

    def on(self, device: torch.device, seed: int) -> TensorActor:
        return self._actor.on(device, seed)
