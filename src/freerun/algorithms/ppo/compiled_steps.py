"""PPO's gradient steps by the compiled kernel: what `FastSteps` computes in numpy, in a single call of C.

The kernel's threads change no result. `Kernel.set_threads` sets their number, which is looked up at every update.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.compiled_kernel import (
    CTYPES_INT,
    CTYPES_POINTER,
    AdamStruct,
    DescentStruct,
    Kernel,
    LayerStruct,
    NetworkStruct,
    PPOStruct,
)
from freerun.algorithms.policies.action_heads import MASKED_LOGIT
from freerun.algorithms.policies.mlp_actor import HiddenActivation
from freerun.algorithms.policies.networks import ActorCritic, masked_logits
from freerun.algorithms.policies.numpy_mlp import LinearLayer, adam_state, layers_of
from freerun.algorithms.ppo.gradient_steps import FlatDescent, ProximalTerm
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import LearnerGroup

ACTIVATIONS: tuple[HiddenActivation, ...] = ("tanh", "relu", "elu")
"""In the order of kernel.c."""


NO_CHOICE = "an action is none of the choices of its space"
PART_NUMBERS = 3
"""Numbers in a `struct part` of ppo.h."""
ROWS_PER_CALL = 100_000
"""A call of C with this many rows takes less than a tenth of a second with small networks. In between, Python looks
after signals such as Ctrl-C."""


class CompiledMLP:
    """The arrays of an MLP as the kernel wants them."""

    def __init__(self, kernel: Kernel, layers: Sequence[LinearLayer], activation: HiddenActivation):
        self._kernel, self._layers = kernel, layers
        self._structs = (LayerStruct * len(layers))()
        # The structs hold addresses alone, so the memory is kept here.
        self._of_parts, self._of_threads, self._of_rows = Memory(), Memory(), Memory()
        self._struct = NetworkStruct(len(layers), ACTIVATIONS.index(activation), ctypes.addressof(self._structs))
        self._struct.widest = max(kernel.padded(layer.weight.shape[1]) for layer in layers)
        self.address = ctypes.addressof(self._struct)
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
            sums_size = (kernel.padded(inputs) + 1) * kernel.padded(outputs)
            struct.sums = self._of_parts.reserve(kernel.most_parts * sums_size)
        self._num_threads = self._num_rows = 0

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for any number of rows, where no gradient is wanted."""
        num_threads = self.make_room_for_threads()
        x = x if x.stride(-1) == 1 else x.contiguous()
        output = torch.empty(len(x), self._structs[-1].outputs)
        self._kernel.network_forward(self.address, num_threads, x.data_ptr(), x.stride(0), len(x), output.data_ptr())
        return output

    def make_room_for_threads(self) -> int:
        """Reserve memory for the kernel's threads of now; return for how many there is."""
        num_threads = self._kernel.num_threads()
        if num_threads > self._num_threads:
            self._num_threads = num_threads
            memory = self._of_threads = Memory()
            for struct in self._structs:
                inputs, outputs = struct.inputs, struct.outputs
                struct.by_input = memory.reserve(num_threads * (inputs + 1) * self._kernel.padded(outputs))
                struct.by_output = memory.reserve(num_threads * outputs * self._kernel.padded(inputs))
            self._struct.scratch = memory.reserve(num_threads * 2 * self._kernel.block_rows * self._struct.widest)
            self._struct.by_input_version, self._struct.by_output_version = (
                memory.reserve(num_threads, torch.int64) for _ in range(2)
            )
        return self._num_threads

    def make_room_for_rows(self, num_rows: int) -> None:
        """Reserve memory for minibatches of up to this many rows."""
        self._of_rows = Memory()
        for struct in self._structs:
            size = num_rows * self._kernel.padded(struct.outputs)
            struct.gradient, struct.activated = self._of_rows.reserve(size), self._of_rows.reserve(size)


class Memory:
    """Arrays of which the kernel's structs hold the addresses."""

    def __init__(self) -> None:
        self._arrays: list[Tensor] = []

    def reserve(self, size: int, kind: torch.dtype = torch.float32) -> int:
        # Torch's memory begins at a multiple of 64 bytes, numpy's anywhere. So vectors lie in one line of the cache,
        # and the compiler's loops, which may begin with single numbers up to such a place, add in the same order.
        self._arrays.append(torch.zeros(size, dtype=kind))
        return self._arrays[-1].data_ptr()


def calls(sizes: Sequence[int]) -> Iterator[slice]:
    """Deal minibatches of these sizes into calls of the kernel."""
    first = num_rows = 0
    for index, size in enumerate(sizes):
        if index > first and num_rows + size > ROWS_PER_CALL:
            yield slice(first, index)
            first, num_rows = index, 0
        num_rows += size
    if sizes:
        yield slice(first, len(sizes))


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


class CompiledAdam:
    """The step of a torch Adam over one flat buffer of weights, by the kernel. The state is the optimiser's own."""

    def __init__(self, weights: nn.Parameter, optimizer: torch.optim.Adam, kernel: Kernel):
        assert weights.grad is not None
        self._parameter, self._optimizer, self._kernel = weights, optimizer, kernel
        self._buffers = weights.detach(), weights.grad

    def struct(self, max_norm: float) -> AdamStruct:
        """The optimiser's state and settings of now."""
        # Looked up again and again: a checkpoint that is loaded replaces the state.
        state = adam_state(self._optimizer, self._parameter)
        tensors = (*self._buffers, state["exp_avg"], state["exp_avg_sq"], state["step"])
        (group,) = self._optimizer.param_groups
        settings = (max_norm, group["lr"], *group["betas"], group["eps"])
        return AdamStruct(self._parameter.numel(), *(tensor.data_ptr() for tensor in tensors), *settings)

    def step(self, max_norm: float) -> bool:
        struct = self.struct(max_norm)  # an address alone would not keep it
        return bool(self._kernel.adam_step(ctypes.addressof(struct)))


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
        self._adam = CompiledAdam(weights, optimizer, kernel)
        self._descent = FlatDescent(weights, self._adam, group, num_bad, proximal)
        self._kernel, self._num_bad_gradients, spec = kernel, num_bad, net.spec
        self._networks = [CompiledMLP(kernel, layers_of(part), spec.activation) for part in (net.actor, net.critic)]
        self.forward = CompiledForward(net, *self._networks)
        self._ppo = PPOStruct(*(network.address for network in self._networks))
        self._ppo.obs_size, self._ppo.critic_first = net.row_size, net.seen_by_critic.start
        self._address = ctypes.addressof(self._ppo)
        self._of_parts, self._of_rows = Memory(), Memory()
        self._ppo.parts = self._of_parts.reserve(kernel.most_parts * PART_NUMBERS, torch.float64)
        self._ppo.has_mask, self._ppo.masked_logit = spec.has_mask, MASKED_LOGIT
        self._ppo.num_categories = len(spec.categories)
        self._is_discrete = not spec.gaussian_size
        if self._is_discrete:
            self._categories = np.array(spec.categories, np.int64)
            self._ppo.categories = self._categories.ctypes.data
        else:
            assert net.log_std.grad is not None
            self._ppo.log_std, self._ppo.log_std_gradient = net.log_std.data_ptr(), net.log_std.grad.data_ptr()
            self._ppo.log_std_sums = self._of_parts.reserve(kernel.most_parts * kernel.padded(spec.gaussian_size))
        self._max_rows = 0

    def begin(self, config: PPOConfig, batch: TrainingBatch) -> None:
        ppo, self._config = self._ppo, config
        ppo.clip_range, ppo.value_coef, ppo.value_clip = config.clip_range, config.value_coef, config.value_clip or 0.0
        ppo.normalizes = config.normalizes_minibatches
        ppo.num_threads = min(network.make_room_for_threads() for network in self._networks)
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
            raise IndexError(NO_CHOICE)
        return log_ratio

    def descend_all(self, minibatches: Sequence[Tensor]) -> Tensor:
        """Take a step down the losses of each minibatch, where nobody has to look at anything in between.

        Return log(pi / pi_proximal) of the rows of all, one minibatch after the other. All rows are this learner's.
        """
        sizes = [rows.numel() for rows in minibatches]
        if max(sizes, default=0) > self._max_rows:
            self._make_room(max(sizes))
        log_ratio = torch.empty(sum(sizes))
        adam, result = self._adam.struct(self._config.max_grad_norm), DescentStruct()
        first_row = 0
        for call in calls(sizes):
            of_call = [rows.contiguous() for rows in minibatches[call]]
            if not self._kernel.ppo_descend(
                self._address,
                len(of_call),
                (CTYPES_POINTER * len(of_call))(*(rows.data_ptr() for rows in of_call)),
                (CTYPES_INT * len(of_call))(*sizes[call]),
                self._config.entropy_coef,
                ctypes.addressof(adam),
                log_ratio[first_row:].data_ptr(),
                ctypes.addressof(result),
            ):
                raise IndexError(NO_CHOICE)
            first_row += sum(sizes[call])
        self._num_bad_gradients += result.num_bad
        self._descent.count(len(sizes), result.policy_loss, result.value_loss)
        return log_ratio

    def _make_room(self, num_rows: int) -> None:
        """Reserve memory for minibatches of up to this many rows."""
        self._max_rows = num_rows
        for network in self._networks:
            network.make_room_for_rows(num_rows)
        memory = self._of_rows = Memory()
        size = num_rows * self._kernel.padded(self._ppo.obs_size)
        self._ppo.actor_rows, self._ppo.critic_rows = memory.reserve(size), memory.reserve(size)
        self._ppo.d_log_prob, self._ppo.advantage_rows = memory.reserve(num_rows), memory.reserve(num_rows)

    def descend(self, share: float) -> None:
        num_rows = len(self._rows)
        entropy_weight = self._config.entropy_coef / max(1, num_rows)
        self._kernel.ppo_backward(self._address, self._rows.data_ptr(), num_rows, entropy_weight)
        self._descent.step(share, self._config.max_grad_norm, self._ppo.policy_loss, self._ppo.value_loss)

    def mean_losses(self) -> Tensor:
        return self._descent.mean_losses()
