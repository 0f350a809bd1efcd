"""Torch networks with a memory. `numpy_memory.py` computes the same in numpy, for workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freerun.algorithms.policies.gru_sequence import GRUSequence
from freerun.algorithms.policies.memory_actor import CELL
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic, masked_logits, mlp
from freerun.algorithms.policies.numpy_memory import ARRAYS, MemoryKind
from freerun.core import FloatArray

KEEP_BIAS = 1.0
"""The first bias of the gate that keeps the memory."""


def make_recurrent_layer(kind: MemoryKind, num_inputs: int, size: int) -> nn.GRU | nn.LSTM:
    """One recurrent layer with orthogonal weights, as is usual for PPO, that forgets slowly before it has learned."""
    layer = nn.GRU(num_inputs, size) if kind == "gru" else nn.LSTM(num_inputs, size)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    # The second block is the gate that keeps what is remembered, z of a GRU and f of an LSTM. With a bias of 0 it would
    # halve the memory at every step (Jozefowicz et al. 2015 recommend 1).
    layer.get_parameter("bias_ih_l0").data[size : 2 * size] = KEEP_BIAS
    return layer


def unroll(layer: nn.GRU | nn.LSTM, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [T, B, size] of a recurrent layer for inputs [T, B, ...], and the memory [B, ...] after the last."""
    if isinstance(layer, nn.GRU) and inputs.device.type == "cpu":
        output = GRUSequence.apply(inputs, memory, *layer.parameters())  # type: ignore[no-untyped-call]
        return output, output[-1]
    if isinstance(layer, nn.GRU):
        output, (last,) = layer(inputs, memory[None])
        return output, last
    hidden, cell = (part[None].contiguous() for part in memory.chunk(2, dim=1))
    output, (hidden, cell) = layer(inputs, (hidden, cell))
    return output, torch.cat([hidden[0], cell[0]], dim=1)


def advance(layer: nn.GRU | nn.LSTM, inputs: Tensor, memory: Tensor) -> Tensor:
    """The memory [B, ...] after one step with inputs [B, ...]. Written out, so that it can be exported and captured."""
    linear, size = nn.functional.linear, layer.hidden_size
    of_input, of_memory, input_bias, memory_bias = (getattr(layer, name) for name in ARRAYS)
    from_input = linear(inputs, of_input, input_bias)
    from_memory = linear(memory[:, :size], of_memory, memory_bias)
    if isinstance(layer, nn.GRU):
        (reset, keep, new), (reset_too, keep_too, new_too) = from_input.chunk(3, dim=1), from_memory.chunk(3, dim=1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_too) * new_too)
        # h' = n + z * (h - n)
        return new + torch.sigmoid(keep + keep_too) * (memory - new)
    write, keep, new, show = (from_input + from_memory).chunk(4, dim=1)
    cell = torch.sigmoid(keep) * memory[:, size:] + torch.sigmoid(write) * torch.tanh(new)
    return torch.cat([torch.sigmoid(show) * torch.tanh(cell), cell], dim=1)


class RecurrentActorCritic(ActorCritic):
    """A policy and a value function that share a recurrent cell, and nothing else.

    The cell sees what the policy sees. Each of the two is an MLP on its own observation beside the cell's output. So
    the memory that a worker keeps is all that the learner needs to go on from the middle of an episode.

    What `head` and `value` take are rows [N, row_size + size]: a normalised observation, and the cell's output for it.
    """

    def __init__(self, spec: ActorSpec, kind: MemoryKind, size: int):
        critic_size = spec.critic_obs_size or spec.obs_size
        actor = mlp((spec.obs_size + size, *spec.hidden_sizes, spec.output_size), spec.activation, 0.01)
        critic = mlp((critic_size + size, *spec.hidden_sizes, 1), spec.activation, 1.0)
        super().__init__(spec, (actor, critic))
        self.memory = make_recurrent_layer(kind, spec.obs_size, size)
        self.memory_size = size if kind == "gru" else 2 * size
        # The learner lays all weights end to end in a buffer of its own, where cuDNN copies the cell's from: some
        # microseconds per minibatch, which torch warns of.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

    def unroll(self, normalized_obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the cell [T, B, size] for observations [T, B, row_size], and the memory [B, memory_size] after."""
        return unroll(self.memory, normalized_obs[..., : self.spec.obs_size], memory)

    def head(self, rows: Tensor) -> Tensor:
        obs, remembered = rows[:, : self.row_size], rows[:, self.row_size :]
        output: Tensor = self.actor(torch.cat([obs[:, : self.spec.obs_size], remembered], dim=1))
        return masked_logits(output, obs) if self.spec.has_mask else output

    def value(self, rows: Tensor) -> Tensor:
        obs, remembered = rows[:, : self.row_size], rows[:, self.row_size :]
        return self.critic(torch.cat([obs[:, self.seen_by_critic], remembered], dim=1)).squeeze(-1)  # type: ignore[no-any-return]

    def worker_arrays(self) -> dict[str, Tensor]:
        cell = {CELL + name: tensor for name, tensor in self.memory.state_dict().items()}
        return {**super().worker_arrays(), **cell}


def make_actor_critic(
    spec: ActorSpec, own_networks: tuple[nn.Module, nn.Module] | None, memory: MemoryKind, memory_size: int
) -> ActorCritic:
    """The networks of PPO, with or without a memory."""
    return ActorCritic(spec, own_networks) if memory == "none" else RecurrentActorCritic(spec, memory, memory_size)


class RecurrentNetwork(nn.Module):
    """The policy's part, from its arrays, for export: (normalised observations, memory) -> (outputs, memory)."""

    def __init__(
        self, network: nn.Module, kind: MemoryKind, num_inputs: int, size: int, arrays: Mapping[str, FloatArray]
    ):
        """`network` is what follows the cell."""
        super().__init__()
        # As layers of this very module, so that all parameters have the names of the policy's arrays.
        self._names = [name for name, _ in network.named_children()]
        for name, layer in network.named_children():
            self.add_module(name, layer)
        self.memory = make_recurrent_layer(kind, num_inputs, size)
        self.memory.load_state_dict({name: torch.from_numpy(arrays[CELL + name].copy()) for name in ARRAYS})

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = advance(self.memory, obs, memory)
        output = torch.cat([obs, memory[:, : self.memory.hidden_size]], dim=1)
        for name in self._names:
            output = self.get_submodule(name)(output)
        return output, memory
