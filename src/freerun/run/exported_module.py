"""A trained policy as one torch module: from observations as the environment gives them to actions that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from freerun.adapters.action_masks import MASK_KEY
from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT
from freerun.algorithms.policies.networks import masked_logits
from freerun.algorithms.policies.numpy_actors import NumpyActor
from freerun.algorithms.policies.torch_actor import TorchActor
from freerun.core import Array, EnvSpaces, UserError, mask_space

OBSERVATION, ACTION, LOGITS = "observation", "action", "logits"
MEMORY, NEXT_MEMORY = "memory", "next_memory"
"""The names of inputs and outputs. A part of a Dict or Tuple is an input of its own, such as observation.camera."""


@dataclass(frozen=True)
class ObservationPart:
    """A part of an observation that is an array of its own: an input of the exported policy."""

    name: str
    space: spaces.Space[Any]
    keys: tuple[Any, ...]
    """The way to this part through Dicts and Tuples."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.space.shape or ()

    @property
    def dtype(self) -> Any:
        """Floats are float32, as in training. Images stay uint8, and all other whole numbers are int64."""
        kind = np.dtype(self.space.dtype)
        return np.dtype(np.float32) if kind.kind == "f" else kind if kind == np.uint8 else np.dtype(np.int64)

    def stack(self, observations: Sequence[Any]) -> Array:
        """Return this part of several observations as one batch."""
        rows = []
        for found in observations:
            for key in self.keys:
                found = found[key]
            rows.append(found)
        return np.asarray(np.array(rows), self.dtype).reshape(len(rows), *self.shape)

    def flatten(self, batch: Tensor) -> Tensor:
        """Do what Gymnasium's `flatten` does with one observation: choices become one-hot rows."""
        if isinstance(self.space, spaces.Discrete):
            batch, starts, sizes = batch[:, None], [int(self.space.start)], [int(self.space.n)]
        elif isinstance(self.space, spaces.MultiDiscrete):
            batch, starts, sizes = batch.flatten(1), self.space.start.ravel().tolist(), self.space.nvec.ravel().tolist()
        else:
            return batch.flatten(1).float()
        choices = [
            nn.functional.one_hot(batch[:, column] - start, size).float()
            for column, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        return torch.cat(choices, dim=1)


def observation_parts(space: spaces.Space[Any]) -> list[ObservationPart]:
    """Return the arrays that an observation consists of, in the order in which they are flattened."""
    return list(_parts(space, OBSERVATION, ()))


def _parts(space: spaces.Space[Any], name: str, keys: tuple[Any, ...]) -> Iterator[ObservationPart]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        for key, part in inner:
            yield from _parts(part, f"{name}.{key}", (*keys, key))
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        yield ObservationPart(name, space, keys)
    else:
        raise UserError(f"observations of {space} cannot be exported: use Box, Discrete, or a Dict or Tuple of them")


class ExtendedObservation(NamedTuple):
    """What a policy takes that was trained with masks or has a memory: an observation, and what it needs besides."""

    observation: Any
    action_mask: Any = None
    """Which actions are allowed."""
    memory: Any = None
    """What the policy remembers before this step."""


def input_parts(space: spaces.Space[Any], action_space: Any, has_mask: bool, memory_size: int) -> list[ObservationPart]:
    """Return the arrays that a policy takes: those of an observation, or of an `ExtendedObservation`."""
    parts = observation_parts(space)
    if not has_mask and not memory_size:
        return parts
    observation, mask, memory = range(len(ExtendedObservation._fields))
    parts = [replace(part, keys=(observation, *part.keys)) for part in parts]
    if has_mask:
        parts.append(ObservationPart(MASK_KEY, mask_space(action_space), (mask,)))
    if memory_size:
        parts.append(ObservationPart(MEMORY, spaces.Box(-np.inf, np.inf, (memory_size,), np.float32), (memory,)))
    return parts


class ExportedModule(nn.Module):
    """Flattens and normalises observations, runs the network, and takes the most likely action within its limits.

    A batch of each part of an observation goes in, a batch of masks if it was trained with them, and what it remembers
    if it has a memory. The actions come out, for discrete ones also the logits, and what it remembers next.
    """

    obs_mean: Tensor
    obs_scale: Tensor
    centre: Tensor
    half_range: Tensor
    low: Tensor
    high: Tensor
    start: Tensor

    def __init__(self, actor: NumpyActor | TorchActor, env_spaces: EnvSpaces):
        super().__init__()
        self._memory_size = actor.memory_size if isinstance(actor, MemoryActor) else 0
        self._spec, self._space = actor.spec, env_spaces.action
        self._parts = observation_parts(env_spaces.observation)
        self._inputs = input_parts(*env_spaces, self._spec.has_mask, self._memory_size)
        self.network = actor.torch_network()
        if self._spec.normalize_obs:
            for name in ("obs_mean", "obs_scale"):
                self.register_buffer(name, torch.from_numpy(actor.arrays[name].copy()))
        if isinstance(self._space, spaces.Box):
            # Squashed actions are stretched from [-1, 1] to the action range.
            low, high = (torch.tensor(limits) for limits in (self._spec.low, self._spec.high))
            self.register_buffer("centre", (high + low) / 2)
            self.register_buffer("half_range", (high - low) / 2)
            self.register_buffer("low", torch.from_numpy(self._space.low.copy()))
            self.register_buffer("high", torch.from_numpy(self._space.high.copy()))
        else:
            start: Any = self._space.start  # type: ignore[attr-defined]
            self.register_buffer("start", torch.as_tensor(np.asarray(start)))
        self.requires_grad_(False).eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        observation, others = inputs[: len(self._parts)], inputs[len(self._parts) :]
        flat = [part.flatten(batch) for part, batch in zip(self._parts, observation, strict=True)]
        x = torch.cat(flat, dim=1)
        if self._spec.normalize_obs:
            x = ((x - self.obs_mean) * self.obs_scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)
        if not self._memory_size:
            return self._act(self.network(x), others)
        output, memory = self.network(x, others[-1])
        return (*self._act(output, others), memory)

    def _act(self, output: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The actions of the network's outputs, and for discrete ones the logits."""
        if self._spec.has_mask:
            output = masked_logits(output, others[0])
        if self._spec.categories:
            return self._choose(output), output
        if self._spec.low:
            mean = output[:, : self._spec.gaussian_size]
            output = self.centre + self.half_range * torch.tanh(mean)
        action = output.reshape(-1, *self.low.shape).to(self.low.dtype)
        return (torch.minimum(torch.maximum(action, self.low), self.high),)

    def _choose(self, logits: Tensor) -> Tensor:
        parts = torch.split(logits, list(self._spec.categories), dim=1)
        choices = torch.stack([part.argmax(dim=1) for part in parts], dim=1)
        return choices.reshape(-1, *self.start.shape) + self.start

    def example(self) -> tuple[Tensor, ...]:
        """Return a valid batch of two observations, for tracing: zeros, or the first choices of discrete parts."""
        first = [np.asarray(getattr(part.space, "start", 0), part.dtype) for part in self._inputs]
        return tuple(
            torch.from_numpy(np.broadcast_to(value, (2, *part.shape)).copy())
            for value, part in zip(first, self._inputs, strict=True)
        )
