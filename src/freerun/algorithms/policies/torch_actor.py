"""The policy that workers run where numpy cannot express the network: any torch module, on one thread."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from freerun.algorithms.policies.action_heads import Gaussian, SingleAct, mask_logits
from freerun.algorithms.policies.batched_actor import BatchedActor
from freerun.algorithms.policies.device_actor import DeviceActor
from freerun.algorithms.policies.image_layers import IMAGE_NETWORKS
from freerun.algorithms.policies.image_networks import image_network
from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT, ActorSpec, flat_size, named_views
from freerun.algorithms.policies.networks import TrunkNetwork, traceable
from freerun.core import Array, Decision, EnvSpec, FloatArray, Policy, TensorActor, UserError, import_callable

Network = Callable[[spaces.Box, int], nn.Module]
"""A user's function from the observation space and the number of outputs to a module [N, *observation] -> [N, outputs].
It is called once for the policy and once, with one output, for the value function."""


class ShapedNetwork(nn.Module):
    """A user's network that takes flat observations, as everything else in freerun does."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]):
        super().__init__()
        self.network = network
        self._shape = shape

    def forward(self, obs: Tensor) -> Tensor:
        output: Tensor = self.network(obs.reshape(-1, *self._shape).float())
        return output


def build(network: str | Network, space: spaces.Box, num_outputs: int) -> ShapedNetwork:
    """Call the user's function and check at once that its module fits observations of this space."""
    make = import_callable(network, "network") if isinstance(network, str) else network
    shape = space.shape
    module = make(space, num_outputs)
    if not isinstance(module, nn.Module):
        raise UserError(f"--network must return a torch.nn.Module, but returned {type(module).__name__}")
    shaped = ShapedNetwork(module, shape)
    try:
        with torch.no_grad():
            # Two rows, so that a network which ignores the batch dimension is found out.
            output = shaped(torch.zeros(2, math.prod(shape)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"--network fails on observations of shape (2, {str(shape)[1:-1]}): {error}") from None
    if output.shape != (2, num_outputs):
        raise UserError(
            f"--network must return (N, {num_outputs}) for N observations, but for 2 it returned {tuple(output.shape)}"
        )
    return shaped


class TorchActor:
    """A `Policy` whose weights are views into one flat buffer, as those of `MLPActor` are."""

    def __init__(self, spec: ActorSpec, network: nn.Module, name: str, scalar_actions: bool, batch_invariant: bool):
        """`name` is the user's function as module:callable, for `describe`."""
        self.spec = spec
        # eval: BatchNorm and dropout must not make an action depend on its batch or on chance.
        self._network = copy.deepcopy(network).cpu().requires_grad_(False).eval()
        self._name = name
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._head = spec.make_head(scalar_actions)
        self.head_size = self._head.size
        self.draw = self._head.draw
        self.decide = self._head.decide
        self.log_prob = self._head.log_prob
        self._map_weights()

    def _map_weights(self) -> None:
        """Move the network's numbers, the normaliser and log(std) into one buffer; the network then reads them there.

        Integers, such as the counters of a BatchNorm, stay where they are: they do not travel to workers.
        """
        tensors = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self.spec.normalize_obs:
            shapes = {"obs_mean": (self.spec.obs_size,), "obs_scale": (self.spec.obs_size,), **shapes}
        if self.spec.gaussian_size:
            shapes["log_std"] = (self.spec.gaussian_size,)
        self.weights: FloatArray = np.zeros(flat_size(shapes), np.float32)
        self.arrays: dict[str, FloatArray] = named_views(self.weights, shapes)
        views = named_views(torch.from_numpy(self.weights), shapes)
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
            tensor.data = views[name]

    def on(self, device: torch.device, seed: int) -> TensorActor:
        network = copy.deepcopy(self._network)
        return DeviceActor(self.spec, network, self.arrays, self._scalar_actions, device, seed)

    def batched_on(self, device: str) -> Policy:
        return BatchedActor(self, device)

    def torch_network(self) -> nn.Module:
        """Return a copy of the network, for export: normalised observations -> outputs."""
        network = copy.deepcopy(self._network)
        if isinstance(network, TrunkNetwork):
            network.head = traceable(network.head)
        return network

    def describe(self) -> dict[str, Any]:
        return {"kind": "torch", "network": self._name, "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any], env: EnvSpec) -> TorchActor:
        """A policy from what `arrays` and `describe` of another one have returned. It needs the network's code."""
        fields = {name: value for name, value in description.items() if name != "kind"}
        name, scalar_actions = fields.pop("network"), fields.pop("scalar_actions")
        spec = ActorSpec.read(fields)
        network: nn.Module
        if name in IMAGE_NETWORKS:
            network = image_network(name, env, spec)
        else:
            network = build(name, env.policy_space, spec.output_size)
        actor = cls(spec, network, name, scalar_actions, batch_invariant=False)
        shapes = {name: array.shape for name, array in actor.arrays.items()}
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise UserError(f"the policy's arrays do not fit the network {name!r}, which has {shapes}")
        actor.load(np.concatenate([arrays[name].reshape(-1) for name in actor.arrays]))
        return actor

    def fits(self, env: EnvSpec) -> bool:
        """True if it takes the observations of an environment and chooses its actions."""
        return self.spec.fits(env)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.spec, self._network, self._name, self._scalar_actions, self._batch_invariant, self.weights

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *arguments, weights = state
        self.__init__(*arguments)  # type: ignore[misc]
        self.load(weights)

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        if isinstance(self._head, Gaussian):
            self._head.load(self.arrays["log_std"])

    def single(self) -> SingleAct:
        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            decision = self.act(obs[None], noise[None])
            head[...] = decision.head[0]
            return decision.action[0]

        return act

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        flat = torch.from_numpy(np.ascontiguousarray(obs)).reshape(len(obs), -1)
        flat = flat[:, : self.spec.obs_size].float()
        if self.spec.normalize_obs:
            mean, scale = (torch.from_numpy(self.arrays[name]) for name in ("obs_mean", "obs_scale"))
            flat = ((flat - mean) * scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        with torch.no_grad():
            # One row at a time gives the same bits however many environments share the call.
            parts = torch.split(flat, 1 if self._batch_invariant else len(flat))
            output = torch.cat([self._network(part) for part in parts]).numpy()
        if self.spec.has_mask:
            mask_logits(output, obs.reshape(len(obs), -1))
        return self._head.decide(output, noise)
