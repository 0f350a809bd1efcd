"""MLPs and Adam in numpy, with gradients written out: the fast learner's arithmetic on a CPU.

With the small networks of this field most of a torch gradient step is bookkeeping, not arithmetic
(`benchmarks/learner_speed_cpu.py` has the figures). Weights and gradients are views of torch's flat buffers, so
everything else, checkpoints included, sees the same numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from freerun.algorithms.policies.mlp_actor import Activation
from freerun.core import FloatArray

MAX_WORKSPACES = 8
"""Minibatches of an update differ by one row at most. Memory for this many different sizes is kept."""
BETA_1, BETA_2 = 0.9, 0.999
"""Adam's decay rates of the two moments, as torch's defaults."""


class LinearLayer(NamedTuple):
    """A layer y = x @ weight.T + bias, and where its gradients go."""

    weight: FloatArray
    bias: FloatArray
    weight_gradient: FloatArray
    bias_gradient: FloatArray


class Workspace(NamedTuple):
    """The memory of one forward and backward pass; allocating it anew would cost more than the small products."""

    outputs: list[FloatArray]
    """By layer, after the activation."""
    output_gradients: list[FloatArray]
    """By layer, before the activation."""
    slopes: list[FloatArray]
    ones: FloatArray
    """[B]: `ones @ d` is the sum over the rows, as a product that BLAS does several times faster than `d.sum(0)`."""


class NumpyMLP:
    """An MLP that shares its weights and gradients with a torch one."""

    def __init__(self, network: nn.Module, activation: Activation):
        """`network` is a Sequential of Linear layers whose parameters have gradients already (`flatten_parameters`)."""
        self._layers = [
            LinearLayer(*(_array(tensor) for tensor in (one.weight, one.bias, one.weight.grad, one.bias.grad)))
            for one in network.children()
            if isinstance(one, nn.Linear)
        ]
        self._activation = activation
        self._workspaces: dict[int, Workspace] = {}

    def forward(self, x: FloatArray) -> FloatArray:
        """[B, inputs] -> [B, outputs]. The result is memory of the network: the next call overwrites it."""
        self._input = x
        self._workspace = self._workspace_for(len(x))
        last = len(self._layers) - 1
        for number, (layer, output) in enumerate(zip(self._layers, self._workspace.outputs, strict=True)):
            np.dot(x, layer.weight.T, out=output)
            output += layer.bias
            if number < last:
                if self._activation == "tanh":
                    np.tanh(output, out=output)
                else:
                    np.maximum(output, 0.0, out=output)
            x = output
        return x

    def backward(self, d_output: FloatArray) -> None:
        """Write the gradients of a loss, given its gradient with respect to what `forward` has just returned."""
        outputs, output_gradients, slopes, ones = self._workspace
        for number in range(len(self._layers) - 1, -1, -1):
            layer = self._layers[number]
            layer_input = outputs[number - 1] if number else self._input
            # y = x W^T + b:  dL/dW = (dL/dy)^T x,  dL/db = sum over rows of dL/dy,  dL/dx = (dL/dy) W
            np.dot(d_output.T, layer_input, out=layer.weight_gradient)
            np.dot(ones, d_output, out=layer.bias_gradient)
            if number == 0:
                break
            d_input, slope = output_gradients[number - 1], slopes[number - 1]
            np.dot(d_output, layer.weight, out=d_input)
            if self._activation == "tanh":
                # tanh'(u) = 1 - tanh(u)^2, and tanh(u) is what the layer before put out
                np.multiply(layer_input, layer_input, out=slope)
                np.subtract(1.0, slope, out=slope)
                d_input *= slope
            else:
                d_input *= layer_input > 0.0
            d_output = d_input

    def _workspace_for(self, num_rows: int) -> Workspace:
        if num_rows not in self._workspaces:
            if len(self._workspaces) == MAX_WORKSPACES:
                self._workspaces.clear()
            sizes = [len(layer.bias) for layer in self._layers]
            outputs, gradients, slopes = ([np.empty((num_rows, size), np.float32) for size in sizes] for _ in range(3))
            self._workspaces[num_rows] = Workspace(outputs, gradients, slopes, np.ones(num_rows, np.float32))
        return self._workspaces[num_rows]


class NumpyAdam:
    """Adam's step (Kingma and Ba 2015) on the flat weights and moments of a torch optimiser, with clipping by norm."""

    def __init__(self, weights: nn.Parameter, moment_1: Tensor, moment_2: Tensor, num_steps: Tensor, epsilon: float):
        self._weights, self._gradient = _array(weights), _array(weights.grad)
        self._moment_1, self._moment_2 = _array(moment_1), _array(moment_2)
        self._num_steps = _array(num_steps)
        self._epsilon = epsilon
        self._change = np.empty_like(self._weights)

    def step(self, learning_rate: float, max_norm: float) -> bool:
        """Return False, and change nothing, if the gradient is not finite."""
        gradient, m, v, change = self._gradient, self._moment_1, self._moment_2, self._change
        norm = math.sqrt(np.dot(gradient, gradient))
        if not math.isfinite(norm):
            return False
        # Clip by norm: g <- g * min(1, max_norm / (|g| + 1e-6))
        if norm + 1e-6 > max_norm:
            gradient *= max_norm / (norm + 1e-6)
        self._num_steps += 1
        num_steps = float(self._num_steps)
        # m <- m + (1 - beta_1) (g - m)
        np.subtract(gradient, m, out=change)
        change *= 1 - BETA_1
        m += change
        # v <- v + (1 - beta_2) (g^2 - v)
        np.multiply(gradient, gradient, out=change)
        change -= v
        change *= 1 - BETA_2
        v += change
        # w <- w - lr * (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps). The correction of v is moved out of the
        # root, so that it takes no pass of its own over the weights.
        correction = math.sqrt(1 - BETA_2**num_steps)
        np.sqrt(v, out=change)
        change += self._epsilon * correction
        np.divide(m, change, out=change)
        change *= learning_rate * correction / (1 - BETA_1**num_steps)
        self._weights -= change
        return True


def _array(tensor: Tensor | None) -> FloatArray:
    """The memory of a torch tensor as an array."""
    assert tensor is not None
    array: FloatArray = tensor.detach().numpy()
    return array
