"""The policy that workers run with `--memory`: a recurrent cell and an MLP behind it, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from freerun.algorithms.policies.action_heads import SingleAct
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor, flat_size, named_views, normalizer
from freerun.algorithms.policies.numpy_memory import MemoryKind, layout, make_cell
from freerun.core import Array, Decision, EnvSpec, FloatArray, MemoryTensorActor, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

CELL = "memory."
"""The names of the cell's arrays begin with this."""


def _mlp_spec(spec: ActorSpec, size: int) -> ActorSpec:
    """The MLP behind the cell: it sees observations that are normalised already, without the critic's group."""
    return replace(spec, obs_size=spec.obs_size + size, normalize_obs=False, critic_obs_size=0)


def actor_layout(spec: ActorSpec, kind: MemoryKind, size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays in the flat buffer, in order: normaliser, cell, MLP."""
    normalizer_shapes = {name: (spec.obs_size,) for name in ("obs_mean", "obs_scale") if spec.normalize_obs}
    cell = {CELL + name: shape for name, shape in layout(kind, spec.obs_size, size).items()}
    return {**normalizer_shapes, **cell, **_mlp_spec(spec, size).layout()}


class MemoryActor:
    """A `MemoryPolicy`: the cell remembers, and the MLP sees the observation and the output of the cell side by side.

    So what an observation shows by itself need not pass through the cell.
    """

    def __init__(
        self, spec: ActorSpec, kind: MemoryKind, size: int, scalar_actions: bool, batch_invariant: bool = False
    ):
        """`spec` describes the policy without its memory; `size` is the number of the cell's units."""
        self.spec = spec
        self.kind, self._size = kind, size
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._cell = make_cell(kind, spec.obs_size, size)
        self.memory_size = self._cell.memory_size
        self._mlp = MLPActor(_mlp_spec(spec, size), scalar_actions, batch_invariant)
        self.head_size, self.draw, self.log_prob = self._mlp.head_size, self._mlp.draw, self._mlp.log_prob
        shapes = actor_layout(spec, kind, size)
        self.weights = np.zeros(flat_size(shapes), np.float32)
        self.arrays: dict[str, FloatArray] = named_views(self.weights, shapes)
        self._normalize = normalizer(self.arrays) if spec.normalize_obs else None
        self._refresh()

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        self._refresh()

    def _refresh(self) -> None:
        """Bring everything up to date that depends on the weights."""
        self._cell.load({name.removeprefix(CELL): array for name, array in self.arrays.items()})
        self._mlp.load(self.weights[-len(self._mlp.weights) :])

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        return self.act_from(obs, noise, np.zeros((len(obs), self.memory_size), np.float32))

    def single(self) -> SingleAct:
        memory = np.zeros(self.memory_size, np.float32)
        act_from = self.single_from(memory)

        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            memory[:] = 0
            return act_from(obs, noise, head)

        return act

    def act_from(self, obs: Array, noise: FloatArray | None, memory: FloatArray) -> Decision:
        num_rows, rows = len(obs), self._new_rows(len(obs))
        gates = np.empty((num_rows, len(self._cell.joined)), np.float32)
        self._read(obs.reshape(num_rows, -1), memory, rows)
        cell_input = rows[:, : self._cell.joined.shape[1]]
        if num_rows == 1 or self._batch_invariant:
            # As in `MLPActor.act`: a product of another height may round differently.
            for row in range(num_rows):
                self._cell.joined.dot(cell_input[row], gates[row])
                self._cell.bind(gates[row], memory[row])()
        else:
            np.dot(cell_input, self._cell.joined.T, gates)
            self._cell.bind(gates, memory)()
        rows[:, self._remembered] = memory[:, : self._size]
        return self._mlp.act(rows if self.spec.has_mask else rows[:, :-1], noise)

    def single_from(self, memory: FloatArray) -> SingleAct:
        # As in `MLPActor`, everything is bound to local names, because a lookup costs time with cold caches.
        act, joined, normalize = self._mlp.single(), self._cell.joined, self._normalize
        row = self._new_rows(1)[0]
        gates = np.zeros(len(joined), np.float32)
        advance, dot = self._cell.bind(gates, memory), joined.dot
        obs_size, has_more = self.spec.obs_size, self.spec.has_more_than_policy_sees
        seen, remembered, cell_input = row[:obs_size], row[self._remembered], row[: joined.shape[1]]
        output = memory[: self._size]
        mask = row[joined.shape[1] :] if self.spec.has_mask else None
        mlp_input = row if self.spec.has_mask else row[:-1]

        def act_single(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            flat = obs if obs.ndim == 1 else obs.reshape(-1)
            seen[...] = flat[:obs_size] if has_more else flat
            if normalize is not None:
                normalize(seen)
            if mask is not None:
                mask[...] = flat[-len(mask) :]
            remembered[...] = output
            dot(cell_input, gates)
            advance()
            remembered[...] = output
            return act(mlp_input, noise, head)

        return act_single

    # A row for the cell and the MLP is [observation, output of the cell, 1, mask]. The cell multiplies its bias by the
    # 1. The MLP takes the numbers before it, and the mask at the end, where there is one.

    @property
    def _remembered(self) -> slice:
        """Where the output of the cell stands in a row."""
        return slice(self.spec.obs_size, self.spec.obs_size + self._size)

    def _new_rows(self, num_rows: int) -> FloatArray:
        num_columns = self.spec.obs_size + self._size + 1 + (self.spec.output_size if self.spec.has_mask else 0)
        return np.ones((num_rows, num_columns), np.float32)

    def _read(self, obs: Array, memory: FloatArray, rows: FloatArray) -> None:
        """Fill rows with observations [B, ...] and the output of the cell before this step."""
        seen = rows[:, : self.spec.obs_size]
        seen[...] = obs[:, : self.spec.obs_size]
        if self._normalize is not None:
            self._normalize(seen)
        rows[:, self._remembered] = memory[:, : self._size]
        if self.spec.has_mask:
            rows[:, -self.spec.output_size :] = obs[:, -self.spec.output_size :]

    # ------------------------------------------------------------------------------------------ elsewhere

    def on(self, device: torch.device, seed: int) -> MemoryTensorActor:
        from freerun.algorithms.policies.memory_device_actor import MemoryDeviceActor  # workers do not import torch

        network = self.torch_network()
        return MemoryDeviceActor(self.spec, network, self.arrays, self._scalar_actions, device, seed, self.memory_size)

    def torch_network(self) -> nn.Module:
        """Return a copy of the cell and of the MLP in torch, for export."""
        from freerun.algorithms.policies.recurrent_networks import RecurrentNetwork

        return RecurrentNetwork(self._mlp.torch_network(), self.kind, self.spec.obs_size, self._size, self.arrays)

    def describe(self) -> dict[str, Any]:
        about = {"kind": "memory", "memory": self.kind, "memory_size": self._size}
        return {**about, "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any]) -> MemoryActor:
        """A policy from what `arrays` and `describe` of another one have returned."""
        fields = {name: value for name, value in description.items() if name != "kind"}
        kind, size, scalar_actions = (fields.pop(name) for name in ("memory", "memory_size", "scalar_actions"))
        if kind not in ("gru", "lstm") or not isinstance(size, int) or size < 1:
            raise UserError(f"the policy has a memory that this version of freerun does not know: {description}")
        spec, shapes = ActorSpec.read(fields), {name: array.shape for name, array in arrays.items()}
        # Before anything is allocated: a file from elsewhere may describe a policy of any size.
        if shapes != (described := actor_layout(spec, kind, size)):
            raise UserError(f"the policy's arrays {shapes} do not fit its description {described}")
        actor = cls(spec, kind, size, bool(scalar_actions))
        actor.load(np.concatenate([arrays[name].reshape(-1) for name in actor.arrays]))
        return actor

    def fits(self, env: EnvSpec) -> bool:
        """True if it takes the observations of an environment and chooses its actions."""
        return self.spec.fits(env)

    def __getstate__(self) -> tuple[Any, ...]:
        # As `MLPActor`: `__init__` makes views and closures again.
        return self.spec, self.kind, self._size, self._scalar_actions, self._batch_invariant, self.weights

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *arguments, weights = state
        self.__init__(*arguments)  # type: ignore[misc]
        self.load(weights)
