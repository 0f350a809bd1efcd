"""MLPs in numpy with gradients written out, and Adam over flat buffers: the fast learner's arithmetic on a CPU.

With the small networks of this field much of a torch gradient step is bookkeeping, not arithmetic
(`benchmarks/learner_speed_cpu.py` has the figures). Weights and gradients are views of torch's flat buffers, so
everything else, checkpoints included, sees the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from freerun.algorithms.policies.mlp_actor import HiddenActivation
from freerun.algorithms.policies.networks import StackedMLP
from freerun.core import Array, FloatArray

MAX_WORKSPACES = 8
"""Minibatches of an update differ by one row at most. Memory for this many different sizes is kept."""


class LinearLayer(NamedTuple):
    """A layer y = x @ weight + bias, and where its gradients go."""

    weight: FloatArray
    """[inputs, outputs]"""
    bias: FloatArray
    weight_gradient: FloatArray
    bias_gradient: FloatArray

    def write_gradients(self, layer_input: FloatArray, d_output: FloatArray, ones: FloatArray) -> None:
        """dL/dW = x^T (dL/dy),  dL/db = sum over rows of dL/dy."""
        # BLAS writes into contiguous memory alone, and torch's Linear keeps its weights as [outputs, inputs].
        if self.weight_gradient.flags.c_contiguous:
            np.dot(layer_input.T, d_output, out=self.weight_gradient)
        else:
            np.dot(d_output.T, layer_input, out=self.weight_gradient.T)
        # A product that BLAS does several times faster than `d_output.sum(0)`.
        np.dot(ones, d_output, out=self.bias_gradient)


def layers_of(network: nn.Module) -> list[LinearLayer]:
    """The layers of a Sequential of Linears whose parameters have gradients already (`flatten_parameters`)."""
    return [
        LinearLayer(_array(one.weight).T, _array(one.bias), _array(one.weight.grad).T, _array(one.bias.grad))
        for one in network.children()
        if isinstance(one, nn.Linear)
    ]


def layers_of_each(networks: StackedMLP) -> list[list[LinearLayer]]:
    """The layers of each of several networks that lie in one stack; their parameters have gradients already."""
    stacks = [
        [_array(tensor) for tensor in (weight, bias[:, 0], weight.grad, bias.grad[:, 0])]
        for weight, bias in zip(networks.weights, networks.biases, strict=True)
    ]
    return [[LinearLayer(*(array[net] for array in stack)) for stack in stacks] for net in range(len(stacks[0][0]))]


class Workspace(NamedTuple):
    """The memory of one forward and backward pass; allocating it anew would cost more than the small products."""

    outputs: list[FloatArray]
    """By layer, after the activation."""
    output_gradients: list[FloatArray]
    """By layer, before the activation."""
    slopes: list[FloatArray]
    ones: FloatArray
    """[B]"""


class NumpyMLP:
    """An MLP that shares its weights and gradients with a torch one."""

    def __init__(self, layers: Sequence[LinearLayer], activation: HiddenActivation, memory_of: NumpyMLP | None = None):
        """`memory_of` is a network of the same shape. Both compute in its memory, which then stays in the cache."""
        self._layers = layers
        if activation == "normalized-relu":
            raise ValueError("the fast learner has no gradients of layer normalisation")
        self._activation = activation
        self._workspaces: dict[int, Workspace] = {} if memory_of is None else memory_of._workspaces

    def forward(self, x: FloatArray) -> FloatArray:
        """[B, inputs] -> [B, outputs]. The result is memory of the network: the next call overwrites it."""
        self._input = x
        self._workspace = self._workspace_for(len(x))
        last = len(self._layers) - 1
        for number, (layer, output) in enumerate(zip(self._layers, self._workspace.outputs, strict=True)):
            np.dot(x, layer.weight, out=output)
            output += layer.bias
            if number < last:
                self._activate(output)
            x = output
        return x

    def _activate(self, output: FloatArray) -> None:
        if self._activation == "tanh":
            np.tanh(output, out=output)
        elif self._activation == "elu":
            torch.nn.functional.elu_(torch.from_numpy(output))  # as for relu: faster than numpy
        else:
            torch.from_numpy(output).relu_()  # faster than np.maximum

    def backward(self, d_output: FloatArray) -> None:
        """Write the gradients of a loss, given its gradient with respect to what `forward` has just returned."""
        outputs, output_gradients, slopes, ones = self._workspace
        for number in range(len(self._layers) - 1, 0, -1):
            layer, layer_input, d_input = self._layers[number], outputs[number - 1], output_gradients[number - 1]
            layer.write_gradients(layer_input, d_output, ones)
            # y = x W + b:  dL/dx = (dL/dy) W^T
            np.dot(d_output, layer.weight.T, out=d_input)
            self._pass_activation(d_input, layer_input, slopes[number - 1])
            d_output = d_input
        self._layers[0].write_gradients(self._input, d_output, ones)

    def input_gradient(self, d_output: FloatArray, rows: Array, inputs: slice) -> FloatArray:
        """The gradient of a loss with respect to these inputs, in these rows of what `forward` was given last.

        `d_output` is the gradient with respect to the outputs of these rows. No gradient of a weight is written.
        """
        outputs, output_gradients, slopes, _ = self._workspace
        num_rows = len(rows)
        for number in range(len(self._layers) - 1, 0, -1):
            d_input, slope = output_gradients[number - 1][:num_rows], slopes[number - 1][:num_rows]
            np.dot(d_output, self._layers[number].weight.T, out=d_input)
            # With mode "clip" numpy writes straight into `out`; the rows exist in any case.
            layer_input = outputs[number - 1].take(rows, axis=0, out=slope, mode="clip")
            self._pass_activation(d_input, layer_input, slope)
            d_output = d_input
        gradient: FloatArray = np.dot(d_output, self._layers[0].weight[inputs].T)
        return gradient

    def _pass_activation(self, gradient: FloatArray, activated: FloatArray, slope: FloatArray) -> None:
        """Multiply a gradient by f'(u), in place, given f(u). `slope` is memory for it, and may be f(u) itself."""
        if self._activation == "tanh":
            # tanh'(u) = 1 - tanh(u)^2
            np.multiply(activated, activated, out=slope)
            np.subtract(1.0, slope, out=slope)
            gradient *= slope
        elif self._activation == "elu":
            # elu'(u) = 1 where elu(u) > 0, and exp(u) = elu(u) + 1 elsewhere
            np.minimum(activated, 0.0, out=slope)
            slope += 1.0
            gradient *= slope
        else:
            gradient *= activated > 0.0

    def _workspace_for(self, num_rows: int) -> Workspace:
        if num_rows not in self._workspaces:
            if len(self._workspaces) == MAX_WORKSPACES:
                self._workspaces.clear()
            sizes = [len(layer.bias) for layer in self._layers]
            outputs, gradients, slopes = ([np.empty((num_rows, size), np.float32) for size in sizes] for _ in range(3))
            self._workspaces[num_rows] = Workspace(outputs, gradients, slopes, np.ones(num_rows, np.float32))
        return self._workspaces[num_rows]


def adam_state(optimizer: torch.optim.Adam, weights: nn.Parameter) -> dict[str, Tensor]:
    """The state of a torch Adam, which is made with its first step."""
    state: dict[str, Tensor] = optimizer.state[weights]
    if not state:
        state |= {"step": torch.tensor(0.0)}
        state |= {name: torch.zeros_like(weights.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return state


class FlatAdam:
    """The step of a torch Adam over one flat buffer of weights, without what `Optimizer.step` does around it.

    The state is the optimiser's own, so a run may go on with the optimiser itself.
    """

    def __init__(self, weights: nn.Parameter, optimizer: torch.optim.Adam):
        assert weights.grad is not None
        self._parameter, self._optimizer = weights, optimizer
        self._weights, self._gradient = weights.detach(), weights.grad

    def step(self, max_norm: float = math.inf) -> bool:
        """Clip the gradient by its norm and take a step. Return False, and change nothing, if it is not finite."""
        # Looked up at every step: a checkpoint that is loaded replaces the state.
        state = adam_state(self._optimizer, self._parameter)
        (group,) = self._optimizer.param_groups
        gradient = _array(self._gradient)
        norm = math.sqrt(np.dot(gradient, gradient))
        if not math.isfinite(norm):
            return False
        # Clip by norm: g <- g * min(1, max_norm / (|g| + 1e-6))
        if norm + 1e-6 > max_norm:
            gradient *= max_norm / (norm + 1e-6)
        adam(
            [self._weights],
            [self._gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return True


def _array(tensor: Tensor | None) -> FloatArray:
    """The memory of a torch tensor as an array."""
    assert tensor is not None
    array: FloatArray = tensor.detach().numpy()
    return array
