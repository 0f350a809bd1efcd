"""Recurrent cells in numpy, for workers. `recurrent_networks.py` has the same in torch, and a test compares the two.

A cell turns an input and what it remembers into what it remembers next. All products of a step are one: the weights of
input, memory and bias stand side by side in one matrix, which is multiplied by [input, memory, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import numpy as np

from freerun.core import FloatArray

MemoryKind = Literal["none", "gru", "lstm"]
HALF = np.float32(0.5)
ARRAYS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
"""A cell's arrays, by the names that torch gives them: weights and biases of the input, and of the memory."""


class MemoryCell(Protocol):
    """A recurrent cell of `size` units, whose arrays are named and laid out as torch lays them out."""

    memory_size: int
    """How many numbers it remembers. The first `size` of them are its output."""
    joined: FloatArray
    """[gates, input + size + 1]: one row per number of `gates`."""

    def load(self, arrays: Mapping[str, FloatArray]) -> None:
        """Take other weights. `joined` stays where it is."""
        ...

    def bind(self, gates: FloatArray, memory: FloatArray) -> Callable[[], None]:
        """Return a function that replaces the memory [..., memory_size] by the next one, from gates [..., gates].

        The gates are the product of `joined` with the step's input and memory; they are overwritten.
        """
        ...


def layout(kind: MemoryKind, num_inputs: int, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a cell's arrays."""
    rows = (3 if kind == "gru" else 4) * size
    return dict(zip(ARRAYS, ((rows, num_inputs), (rows, size), (rows,), (rows,)), strict=True))


def make_cell(kind: MemoryKind, num_inputs: int, size: int) -> MemoryCell:
    return GRU(num_inputs, size) if kind == "gru" else LSTM(num_inputs, size)


class GRU:
    """A gated recurrent unit (Cho et al. 2014), as torch has it.

    r = sigmoid(W_r x + U_r h + b_r),  z = sigmoid(W_z x + U_z h + b_z),  n = tanh(W_n x + b_n + r * (U_n h + c_n)),
    h' = (1 - z) * n + z * h
    """

    def __init__(self, num_inputs: int, size: int):
        self._num_inputs, self._size = num_inputs, size
        self.memory_size = size
        # Four blocks: r, z, and the two parts of n, which meet only after r is known.
        self.joined: FloatArray = np.zeros((4 * size, num_inputs + size + 1), np.float32)

    def load(self, arrays: Mapping[str, FloatArray]) -> None:
        of_input, of_memory, input_bias, memory_bias = (arrays[name] for name in ARRAYS)
        size, num_inputs, joined = self._size, self._num_inputs, self.joined
        gates, rest = slice(2 * size), slice(2 * size, None)
        # Halved: sigmoid(x) = (1 + tanh(x / 2)) / 2, and a half of a weight is exact.
        joined[gates, :num_inputs] = of_input[gates] * HALF
        joined[gates, num_inputs:-1] = of_memory[gates] * HALF
        joined[gates, -1] = (input_bias[gates] + memory_bias[gates]) * HALF
        joined[2 * size : 3 * size, :num_inputs] = of_input[rest]
        joined[2 * size : 3 * size, -1] = input_bias[rest]
        joined[3 * size :, num_inputs:-1] = of_memory[rest]
        joined[3 * size :, -1] = memory_bias[rest]

    def bind(self, gates: FloatArray, memory: FloatArray) -> Callable[[], None]:
        size = self._size
        both, reset, keep = gates[..., : 2 * size], gates[..., :size], gates[..., size : 2 * size]
        new, of_memory = gates[..., 2 * size : 3 * size], gates[..., 3 * size :]
        tanh, multiply, add, subtract = np.tanh, np.multiply, np.add, np.subtract

        def advance() -> None:
            tanh(both, both)
            multiply(both, HALF, both)
            add(both, HALF, both)
            multiply(of_memory, reset, of_memory)
            add(new, of_memory, new)
            tanh(new, new)
            # h' = n + z * (h - n)
            subtract(memory, new, memory)
            multiply(memory, keep, memory)
            add(memory, new, memory)

        return advance


class LSTM:
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with a forget gate), as torch has it.

    i, f, o = sigmoid(W x + U h + b),  g = tanh(W_g x + U_g h + b_g),  c' = f * c + i * g,  h' = o * tanh(c').
    It remembers [h, c].
    """

    def __init__(self, num_inputs: int, size: int):
        self._num_inputs, self._size = num_inputs, size
        self.memory_size = 2 * size
        self.joined: FloatArray = np.zeros((4 * size, num_inputs + size + 1), np.float32)

    def load(self, arrays: Mapping[str, FloatArray]) -> None:
        of_input, of_memory, input_bias, memory_bias = (arrays[name] for name in ARRAYS)
        joined = np.concatenate([of_input, of_memory, (input_bias + memory_bias)[:, None]], axis=1)
        # Torch's order is i, f, g, o. With g last, the three sigmoids stand side by side; halved as those of a GRU.
        i, f, g, o = np.split(joined, 4)
        self.joined[...] = np.concatenate([i * HALF, f * HALF, o * HALF, g])

    def bind(self, gates: FloatArray, memory: FloatArray) -> Callable[[], None]:
        size = self._size
        sigmoids = gates[..., : 3 * size]
        write, keep, show = gates[..., :size], gates[..., size : 2 * size], gates[..., 2 * size : 3 * size]
        new, output, cell = gates[..., 3 * size :], memory[..., :size], memory[..., size:]
        tanh, multiply, add = np.tanh, np.multiply, np.add

        def advance() -> None:
            tanh(gates, gates)
            multiply(sigmoids, HALF, sigmoids)
            add(sigmoids, HALF, sigmoids)
            multiply(cell, keep, cell)
            multiply(new, write, new)
            add(cell, new, cell)
            tanh(cell, output)
            multiply(output, show, output)

        return advance
