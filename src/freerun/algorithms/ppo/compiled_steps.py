"""PPO's gradient steps by the compiled kernel: what `FastSteps` computes in numpy, in two calls of C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.compiled_kernel import Kernel, LayerStruct, NetworkStruct, PPOStruct
from freerun.algorithms.policies.action_heads import MASKED_LOGIT
from freerun.algorithms.policies.mlp_actor import HiddenActivation
from freerun.algorithms.policies.networks import ActorCritic, masked_logits
from freerun.algorithms.policies.numpy_mlp import LinearLayer, layers_of
from freerun.algorithms.ppo.gradient_steps import FlatDescent, ProximalTerm
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import LearnerGroup

ACTIVATIONS: tuple[HiddenActivation, ...] = ("tanh", "relu", "elu")
"""In the order of kernel.c."""


FORWARD_ROWS = 960
"""Rows of a call that computes outputs alone: ten of the kernel's blocks, whose numbers stay in a cache of 1 MiB."""


class CompiledMLP:
    """The arrays of an MLP as the kernel wants them."""

    def __init__(self, kernel: Kernel, layers: Sequence[LinearLayer], activation: HiddenActivation):
        self._kernel, self._layers = kernel, layers
        self._structs = (LayerStruct * len(layers))()
        self._memory: list[Tensor] = []  # the structs hold its addresses alone
        self.struct = NetworkStruct(len(layers), ACTIVATIONS.index(activation), ctypes.addressof(self._structs))
        for layer, struct in zip(layers, self._structs, strict=True):
            inputs, outputs = layer.weight.shape
            struct.inputs, struct.outputs = inputs, outputs
            struct.weight, struct.bias = layer.weight.ctypes.data, layer.bias.ctypes.data
            struct.weight_gradient, struct.bias_gradient = (
                gradient.ctypes.data for gradient in (layer.weight_gradient, layer.bias_gradient)
            )
            assert layer.weight.strides == layer.weight_gradient.strides
            struct.input_stride, struct.output_stride = (stride // 4 for stride in layer.weight.strides)
            # The biases stand behind the weights.
            struct.by_input = self._reserve((inputs + 1) * kernel.padded(outputs))
            struct.by_output = self._reserve(outputs * kernel.padded(inputs))
            struct.sums = self._reserve(kernel.padded(inputs) * kernel.padded(outputs))
        self._num_own = len(self._memory)
        self._num_outputs = layers[-1].weight.shape[1]
        self.make_room(FORWARD_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for any number of rows, where no gradient is wanted."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        output = torch.empty(len(x), self._num_outputs)
        for part, target in zip(torch.split(x, FORWARD_ROWS), torch.split(output, FORWARD_ROWS), strict=True):
            self._kernel.network_forward(ctypes.addressof(self.struct), part.data_ptr(), x.stride(0), len(part))
            target.copy_(self._last_activated[: len(part), : self._num_outputs])
        return output

    def _reserve(self, size: int) -> int:
        # Torch's memory begins at a multiple of 64 bytes, numpy's anywhere. So vectors lie in one line of the cache,
        # and the compiler's loops, which may begin with single numbers up to such a place, add in the same order.
        self._memory.append(torch.zeros(size))
        return self._memory[-1].data_ptr()

    def make_room(self, num_rows: int) -> None:
        """Reserve memory for minibatches of up to this many rows."""
        del self._memory[self._num_own :]
        for struct in self._structs:
            size = max(num_rows, FORWARD_ROWS) * self._kernel.padded(struct.outputs)
            struct.gradient, struct.activated = self._reserve(size), self._reserve(size)
        self._last_activated = self._memory[-1].view(-1, self._kernel.padded(self._num_outputs))


class CompiledForward:
    """An `ActorCritic` where no gradient is wanted: the kernel computes its networks."""

    def __init__(self, net: ActorCritic, actor: CompiledMLP, critic: CompiledMLP):
        self._net, self._actor, self._critic = net, actor, critic

    def head(self, normalized_obs: Tensor) -> Tensor:
        spec = self._net.spec
        output = self._actor(normalized_obs[:, : spec.obs_size])
        return masked_logits(output, normalized_obs) if spec.has_mask else output

    def value(self, normalized_obs: Tensor) -> Tensor:
        return self._critic(normalized_obs[:, self._net.seen_by_critic]).squeeze(-1)

    def head_and_value(self, normalized_obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(normalized_obs), self.value(normalized_obs)


class CompiledSteps:
    """The kernel computes losses and gradients. A test compares it with autograd, setting by setting."""

    def __init__(
        self,
        net: ActorCritic,
        weights: nn.Parameter,
        optimizer: torch.optim.Adam,
        group: LearnerGroup,
        num_bad: Tensor,
        proximal: ProximalTerm,
        kernel: Kernel,
    ):
        self._descent = FlatDescent(weights, optimizer, group, num_bad, proximal, kernel)
        self._kernel, spec = kernel, net.spec
        self._networks = [CompiledMLP(kernel, layers_of(part), spec.activation) for part in (net.actor, net.critic)]
        self.forward = CompiledForward(net, *self._networks)
        self._ppo = PPOStruct(*(network.struct for network in self._networks), net.row_size, net.seen_by_critic.start)
        self._address = ctypes.addressof(self._ppo)
        self._ppo.has_mask, self._ppo.masked_logit = spec.has_mask, MASKED_LOGIT
        self._ppo.num_categories = len(spec.categories)
        self._is_discrete = not spec.gaussian_size
        if self._is_discrete:
            self._categories = np.array(spec.categories, np.int64)
            self._ppo.categories = self._categories.ctypes.data
        else:
            assert net.log_std.grad is not None
            self._ppo.log_std, self._ppo.log_std_gradient = net.log_std.data_ptr(), net.log_std.grad.data_ptr()
        self._max_rows = 0

    def begin(self, config: PPOConfig, batch: TrainingBatch) -> None:
        ppo, self._config = self._ppo, config
        ppo.clip_range, ppo.value_coef, ppo.value_clip = config.clip_range, config.value_coef, config.value_clip or 0.0
        ppo.normalizes = config.normalizes_minibatches
        # The struct holds addresses alone, so the columns are kept here while the update lasts.
        kinds = [torch.float32] * len(batch)
        if self._is_discrete:
            kinds[batch._fields.index("action")] = torch.int64
        self._columns = [column.to(kind).contiguous() for column, kind in zip(batch, kinds, strict=True)]
        addresses = (column.data_ptr() for column in self._columns)
        ppo.obs, ppo.action, ppo.proximal, ppo.weight, ppo.advantage, ppo.target, ppo.value = addresses
        self._descent.begin()

    def compute(self, rows: Tensor, advantage_of_all: Tensor | None) -> Tensor:
        num_rows = len(rows)
        if num_rows > self._max_rows:
            self._make_room(num_rows)
        self._rows = rows.contiguous()
        log_ratio = torch.empty(num_rows)
        of_all, num_all = (
            (None, 0) if advantage_of_all is None else (advantage_of_all.data_ptr(), len(advantage_of_all))
        )
        if not self._kernel.ppo_forward(
            self._address, self._rows.data_ptr(), num_rows, log_ratio.data_ptr(), of_all, num_all
        ):
            raise IndexError("an action is none of the choices of its space")
        return log_ratio

    def _make_room(self, num_rows: int) -> None:
        """Reserve memory for minibatches of up to this many rows."""
        self._max_rows = num_rows
        for network in self._networks:
            network.make_room(num_rows)
        # A whole row more: the kernel reads whole vectors, also from where the critic's numbers begin.
        row_size = self._kernel.padded(self._ppo.obs_size)
        self._memory = [torch.zeros(size) for size in ((num_rows + 1) * row_size, num_rows, num_rows)]
        self._ppo.obs_rows, self._ppo.d_log_prob, self._ppo.advantage_rows = (one.data_ptr() for one in self._memory)

    def descend(self, share: float) -> None:
        num_rows = len(self._rows)
        entropy_weight = self._config.entropy_coef / max(1, num_rows)
        self._kernel.ppo_backward(self._address, self._rows.data_ptr(), num_rows, entropy_weight)
        self._descent.step(share, self._config.max_grad_norm, self._ppo.policy_loss, self._ppo.value_loss)

    def mean_losses(self) -> Tensor:
        return self._descent.mean_losses()
