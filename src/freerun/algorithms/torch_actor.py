"""The policy as workers run it when numpy cannot express it: any network, in torch, on one thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from freerun.algorithms.actor import NORMALIZED_LIMIT, ActorSpec
from freerun.algorithms.heads import Gaussian, Single
from freerun.algorithms.tensor_actor import DeviceActor
from freerun.core import Array, Decision, EnvSpec, FloatArray, TensorActor, UserError, import_callable

Network = Callable[[spaces.Box, int], nn.Module]
"""A user's own: given the observation space and the number of outputs, a module from [N, *observation] to
[N, outputs]. Called once for the policy and once, with one output, for the value function."""


class Shaped(nn.Module):
    """A user's network behind the flat observations that the rest of freerun deals in."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]):
        super().__init__()
        self.network = network
        self._shape = shape

    def forward(self, obs: Tensor) -> Tensor:
        output: Tensor = self.network(obs.reshape(-1, *self._shape))
        return output


def build(network: str | Network, env: EnvSpec, num_outputs: int) -> Shaped:
    """Call the user's function, and see at once whether what it returns fits."""
    make = import_callable(network, "network") if isinstance(network, str) else network
    shape = env.observation_space.shape
    module = make(env.observation_space, num_outputs)
    if not isinstance(module, nn.Module):
        raise UserError(f"--network must return a torch.nn.Module, but returned {type(module).__name__}")
    shaped = Shaped(module, shape)
    try:
        with torch.no_grad():
            output = shaped(torch.zeros(2, int(np.prod(shape))))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"--network fails on observations of shape (2, {str(shape)[1:-1]}): {error}") from None
    if output.shape != (2, num_outputs):
        raise UserError(
            f"--network must return (N, {num_outputs}) for N observations, but for 2 it returned {tuple(output.shape)}"
        )
    return shaped


class TorchActor:
    """A `Policy` whose weights are views into one flat buffer, as those of `MLPActor`."""

    def __init__(self, spec: ActorSpec, network: nn.Module, name: str, scalar_actions: bool, batch_invariant: bool):
        self.spec = spec
        self._network = copy.deepcopy(network).cpu().requires_grad_(False).eval()
        self._name = name
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._head = spec.make_head(scalar_actions)
        self.head_size = self._head.size
        self.draw = self._head.draw
        self.log_prob = self._head.log_prob
        self._map()

    def _map(self) -> None:
        """Lay the network's numbers, the normaliser and the deviation end to end in one buffer."""
        tensors = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self.spec.normalize_obs:
            shapes = {"obs_mean": (self.spec.obs_size,), "obs_scale": (self.spec.obs_size,), **shapes}
        if self.spec.gaussian_size:
            shapes["log_std"] = (self.spec.gaussian_size,)
        self.weights: FloatArray = np.zeros(sum(int(np.prod(shape)) for shape in shapes.values()), np.float32)
        flat = torch.from_numpy(self.weights)
        self.arrays: dict[str, FloatArray] = {}
        start = 0
        for name, shape in shapes.items():
            end = start + int(np.prod(shape))
            self.arrays[name] = self.weights[start:end].reshape(shape)
            if name in tensors:
                flat[start:end] = tensors[name].detach().reshape(-1)
                tensors[name].data = flat[start:end].view(shape)
            start = end

    def on(self, device: torch.device, seed: int) -> TensorActor:
        network = copy.deepcopy(self._network)
        return DeviceActor(self.spec, network, self.arrays, self._scalar_actions, device, seed)

    def describe(self) -> dict[str, Any]:
        return {"kind": "torch", "network": self._name, "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any], env: EnvSpec) -> TorchActor:
        """The reverse of `arrays` and `describe`; the network's own code must be there."""
        fields = {name: value for name, value in description.items() if name != "kind"}
        name, scalar_actions = fields.pop("network"), fields.pop("scalar_actions")
        spec = ActorSpec.read(fields)
        actor = cls(spec, build(name, env, spec.output_size), name, scalar_actions, batch_invariant=False)
        shapes = {name: array.shape for name, array in actor.arrays.items()}
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise UserError(f"the policy's arrays do not fit the network {name!r}, which has {shapes}")
        actor.load(np.concatenate([arrays[name].reshape(-1) for name in actor.arrays]))
        return actor

    def __getstate__(self) -> dict[str, Any]:
        names = ("spec", "_network", "_name", "_scalar_actions", "_batch_invariant")
        return {**{name: getattr(self, name) for name in names}, "weights": self.weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weights = state.pop("weights")
        self.__init__(*state.values())  # type: ignore[misc]
        self.load(weights)

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        if isinstance(self._head, Gaussian):
            self._head.load(self.arrays["log_std"])

    def single(self) -> Single:
        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            decision = self.act(obs[None], noise[None])
            head[...] = decision.head[0]
            return decision.action[0]

        return act

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        flat = torch.from_numpy(np.ascontiguousarray(obs)).reshape(len(obs), -1).float()
        if self.spec.normalize_obs:
            mean, scale = (torch.from_numpy(self.arrays[name]) for name in ("obs_mean", "obs_scale"))
            flat = ((flat - mean) * scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        with torch.no_grad():
            # One row at a time gives the same bits however many environments share the call.
            parts = torch.split(flat, 1 if self._batch_invariant else len(flat))
            output = torch.cat([self._network(part) for part in parts])
        return self._head.choose(output.numpy(), noise)
