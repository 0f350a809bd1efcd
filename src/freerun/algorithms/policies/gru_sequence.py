"""A GRU unrolled over sequences on a CPU, with its gradient written out in numpy.

Torch has a fast LSTM for CPUs but no fast GRU: its autograd takes a small operation at a time, forwards and backwards.
Here a step back in time is one product and a few operations. `tests/algorithms/test_gru_sequence.py` compares both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from freerun.core import FloatArray

HALF = np.float32(0.5)


class GRUSequence(torch.autograd.Function):
    """From inputs [T, B, X], memory [B, H] and the weights of `torch.nn.GRU` to its outputs [T, B, H].

    r, z = sigmoid(a_r, a_z),  n = tanh(W_n x + b_n + r * u) with u = U_n h + c_n,  h' = n + z * (h - n)
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        x, first, of_input, of_memory, input_bias, memory_bias = (
            tensor.detach().numpy() for tensor in (inputs, memory, *weights)
        )
        num_steps, num_rows, size = len(x), len(first), first.shape[1]
        from_input = (x.reshape(num_steps * num_rows, -1).dot(of_input.T) + input_bias).reshape(num_steps, num_rows, -1)
        hidden = np.empty((num_steps + 1, num_rows, size), np.float32)
        gates = np.empty((num_steps, num_rows, 2 * size), np.float32)  # r and z
        new, of_hidden = np.empty((2, num_steps, num_rows, size), np.float32)  # n and u
        hidden[0] = first
        transposed = of_memory.T
        for step in range(num_steps):
            from_memory = hidden[step].dot(transposed)
            from_memory += memory_bias
            gate, candidate, candidate_of_hidden = gates[step], new[step], of_hidden[step]
            np.add(from_input[step, :, : 2 * size], from_memory[:, : 2 * size], out=gate)
            # sigmoid(x) = (1 + tanh(x / 2)) / 2
            gate *= HALF
            np.tanh(gate, out=gate)
            gate *= HALF
            gate += HALF
            candidate_of_hidden[...] = from_memory[:, 2 * size :]
            np.multiply(gate[:, :size], candidate_of_hidden, out=candidate)
            candidate += from_input[step, :, 2 * size :]
            np.tanh(candidate, out=candidate)
            following = hidden[step + 1]
            np.subtract(hidden[step], candidate, out=following)
            following *= gate[:, size:]
            following += candidate
        ctx.kept = x, hidden, gates, new, of_hidden, of_input, of_memory
        return torch.from_numpy(hidden[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, hidden, gates, new, of_hidden, of_input, of_memory = ctx.kept
        d_output = grads[0].numpy()
        num_steps, num_rows, size = new.shape
        reset, keep = gates[..., :size], gates[..., size:]
        # Slopes of all steps at once: dh'/da_n = (1 - z)(1 - n^2), dh'/da_z = (h - n) z (1 - z), dn/da_r = u r (1 - r)
        slopes: FloatArray = np.empty((num_steps, num_rows, 3 * size), np.float32)
        slopes[..., 2 * size :] = (1 - keep) * (1 - new * new)
        slopes[..., size : 2 * size] = (hidden[:-1] - new) * keep * (1 - keep)
        slopes[..., :size] = slopes[..., 2 * size :] * of_hidden * reset * (1 - reset)
        # Of the pre-activations of the inputs' side; those of the memory's side differ in the last third, by r.
        d_gates = np.empty_like(slopes)
        d_memory_gates = np.empty_like(slopes)
        d_hidden = np.zeros((num_rows, size), np.float32)
        for step in range(num_steps - 1, -1, -1):
            d_hidden += d_output[step]
            gate, of_memory_gate = d_gates[step], d_memory_gates[step]
            np.multiply(slopes[step].reshape(num_rows, 3, size), d_hidden[:, None], out=gate.reshape(num_rows, 3, size))
            of_memory_gate[...] = gate
            of_memory_gate[:, 2 * size :] *= reset[step]
            d_hidden *= keep[step]
            d_hidden += of_memory_gate.dot(of_memory)
        flat, flat_of_memory = (part.reshape(-1, 3 * size) for part in (d_gates, d_memory_gates))
        needs_inputs, needs_memory = ctx.needs_input_grad[:2]
        results: tuple[FloatArray | None, ...] = (
            flat.dot(of_input).reshape(x.shape) if needs_inputs else None,
            d_hidden if needs_memory else None,
            flat.T.dot(x.reshape(len(flat), -1)),
            flat_of_memory.T.dot(hidden[:-1].reshape(len(flat), size)),
            flat.sum(axis=0),
            flat_of_memory.sum(axis=0),
        )
        return tuple(None if result is None else torch.from_numpy(result) for result in results)
