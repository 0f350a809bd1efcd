"""SAC's gradient steps on a GPU, with the gradients written out.

The networks are small, so a captured gradient step takes as long as its longest chain of kernels that wait for each
other, however little each of them computes. Autograd's kernels form a single chain. Here the chain is as short as the
arithmetic allows: what the next kernel does not need runs beside it on another stream. The gradients of a layer's
weights are computed while the gradient goes on to the layer before, each critic has a stream of its own, and the
critics look at the stored actions while the policy and the target critics make the targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.algorithms.policies.action_heads import LOG_STD_LIMITS
from freerun.algorithms.policies.mlp_actor import HiddenActivation
from freerun.algorithms.policies.networks import StackedMLP, squashed_sample
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.soft_steps import StepParts
from freerun.cuda_graphs import fused, resolve_acceleration

NUM_STREAMS = 8
"""Of kernels that run beside the main chain: with more, some would be idle."""


class Branches:
    """Work that runs beside the current stream. On a CPU everything runs in turn."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: Iterator[torch.cuda.Stream] | None = None
        self._open: list[torch.cuda.Stream] = []
        self._kept: list[Tensor] = []

    @contextmanager
    def fork(self, *kept: Tensor) -> Iterator[None]:
        """Run what follows beside the current stream, after all that has been started there so far.

        Tensors that it reads or makes must outlive the next `join`: their memory would be used again. `kept` are those
        that nobody else refers to.
        """
        if self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        if self._streams is None:  # with the priority of the stream that is captured
            streams = (torch.cuda.Stream(self._device, current.priority) for _ in range(NUM_STREAMS))  # type: ignore[no-untyped-call]
            self._streams = itertools.cycle(streams)
        stream = next(one for one in self._streams if one != current)
        stream.wait_stream(current)
        self._open.append(stream)
        self._kept += kept
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all branches."""
        for stream in dict.fromkeys(self._open):
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._open.clear()
        self._kept.clear()


class TorchLayer(NamedTuple):
    """A layer y = x @ weight + bias, and where its gradients go: views of the flat buffers."""

    weight: Tensor
    """[inputs, outputs]"""
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor


def _layer(weight: Tensor, bias: Tensor, weight_gradient: Tensor | None, bias_gradient: Tensor | None) -> TorchLayer:
    assert weight_gradient is not None
    assert bias_gradient is not None
    return TorchLayer(weight.detach(), bias.detach(), weight_gradient, bias_gradient)


def layers_of(network: nn.Module) -> list[TorchLayer]:
    """The layers of a Sequential of Linears whose parameters have gradients already (`flatten_parameters`)."""
    linears = [one for one in network.children() if isinstance(one, nn.Linear)]
    return [
        _layer(one.weight.T, one.bias, one.weight.grad.T, one.bias.grad)
        for one in linears
        if one.weight.grad is not None
    ]


def layers_of_each(networks: StackedMLP) -> list[list[TorchLayer]]:
    """The layers of each of several networks that lie in one stack. Without gradients, those are the weights' own."""
    stacks = [
        (weight, bias, weight if weight.grad is None else weight.grad, bias if bias.grad is None else bias.grad)
        for weight, bias in zip(networks.weights, networks.biases, strict=True)
    ]
    return [
        [_layer(weight[k], bias[k, 0], d_weight[k], d_bias[k, 0]) for weight, bias, d_weight, d_bias in stacks]
        for k in range(len(stacks[0][0]))
    ]


def _pass_relu(gradient: Tensor, activated: Tensor) -> Tensor:
    passed: Tensor = torch.ops.aten.threshold_backward(gradient, activated, 0)
    return passed


def _pass_tanh(gradient: Tensor, activated: Tensor) -> Tensor:
    passed: Tensor = torch.ops.aten.tanh_backward(gradient, activated)
    return passed


def _pass_elu(gradient: Tensor, activated: Tensor) -> Tensor:
    passed: Tensor = torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, True, activated)
    return passed


ACTIVATIONS: dict[HiddenActivation, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu_, _pass_relu),
    "tanh": (torch.tanh_, _pass_tanh),
    "elu": (nn.functional.elu_, _pass_elu),
}
"""Each activation in place, and the gradient of its input, given the gradient and the value of its output."""


class WrittenMLP:
    """An MLP with its gradients written out."""

    def __init__(self, layers: Sequence[TorchLayer], activation: HiddenActivation, branches: Branches):
        self._layers, self._branches = layers, branches
        self._is_relu = activation == "relu"
        self._activate, self._pass = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> list[Tensor]:
        """The input of every layer, and last the output."""
        kept = [x]
        for layer in self._layers[:-1]:
            # Bias and ReLU cost no kernels of their own: the product adds them while it writes its results.
            if self._is_relu:
                x = torch._addmm_activation(layer.bias, x, layer.weight)
            else:
                x = self._activate(torch.addmm(layer.bias, x, layer.weight))
            kept.append(x)
        last = self._layers[-1]
        return [*kept, torch.addmm(last.bias, x, last.weight)]

    def backward(self, kept: Sequence[Tensor], gradient: Tensor) -> None:
        """Write the gradients of all weights, given that of the output. They are there after the branches' `join`."""
        for index in reversed(range(len(self._layers))):
            layer, layer_input = self._layers[index], kept[index]
            with self._branches.fork(gradient, layer_input):
                torch.sum(gradient, 0, out=layer.bias_gradient)
            if not index:
                torch.mm(layer_input.T, gradient, out=layer.weight_gradient)
                return
            with self._branches.fork():
                torch.mm(layer_input.T, gradient, out=layer.weight_gradient)
            gradient = self._pass(torch.mm(gradient, layer.weight.T), layer_input)

    def input_gradient(self, kept: Sequence[Tensor], gradient: Tensor, columns: slice) -> Tensor:
        """The gradient of these columns of the input, given that of the output."""
        for layer, layer_input in reversed(list(zip(self._layers[1:], kept[1:-1], strict=True))):
            gradient = self._pass(torch.mm(gradient, layer.weight.T), layer_input)
        return torch.mm(gradient, self._layers[0].weight[columns].T)


class GPUSoftSteps:
    """The losses are those of `AutogradSoftSteps`, and a test compares the two ways, setting by setting."""

    def __init__(self, parts: StepParts):
        self._networks, self._config, self._target_entropy, self._group, self._counters = parts
        networks = parts.networks
        device = networks.actor_weights.device
        self._branches = Branches(device)
        self._actor = WrittenMLP(layers_of(networks.policy.net), networks.spec.activation, self._branches)
        self._critics, self._target_critics = (
            [WrittenMLP(layers, "relu", self._branches) for layers in layers_of_each(critics)]
            for critics in (networks.critics, networks.target_critics)
        )
        acceleration = resolve_acceleration(parts.config.acceleration, device)
        self._seen, self._act = fused(seen, acceleration), fused(act, acceleration)
        self._log_prob, self._errors = fused(log_probs, acceleration), fused(errors, acceleration)
        self._of_smaller = fused(gradients_of_smaller, acceleration)
        self._through_head = fused(head_gradient, acceleration)
        self._measure, self._check = fused(measure, acceleration), fused(check, acceleration)

    @torch.no_grad()
    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        nets, branches = self._networks, self._branches
        num_rows, log_temperature = len(steps.reward), nets.policy.log_temperature.detach()

        with branches.fork():
            stored = torch.cat([steps.obs, steps.action], dim=1)
            passes = self._of_each(self._critics, stored)
        rows = self._seen(steps.obs, steps.next_obs, steps.terminated)
        actor_pass = self._actor.forward(rows)
        with branches.fork():
            log_prob = self._log_prob(actor_pass[-1], noise)
        acted = self._act(rows, actor_pass[-1], noise)
        of_targets = self._of_each(self._target_critics, acted[num_rows:])
        branches.join()
        first_error, second_error, *gradients = self._errors(
            (passes[0][-1], passes[1][-1]),
            (of_targets[0][-1], of_targets[1][-1]),
            log_prob[num_rows:],
            (steps.reward, steps.terminated, weight),
            log_temperature,
            self._config.gamma,
        )
        for critic, kept, gradient in zip(self._critics, passes, gradients, strict=True):
            with branches.fork():
                critic.backward(kept, gradient)
        branches.join()
        self._descend(nets.critic_weights, nets.critic_optimizer, share)
        with branches.fork():
            # Target critics: w_target <- (1 - tau) * w_target + tau * w
            nets.target_weights.lerp_(nets.critic_weights.detach(), self._config.target_rate)

        passes = self._of_each(self._critics, acted[:num_rows])
        branches.join()
        values = passes[0][-1], passes[1][-1]
        d_actions = []
        for critic, kept, gradient in zip(self._critics, passes, self._of_smaller(*values), strict=True):
            with branches.fork():
                d_actions.append(critic.input_gradient(kept, gradient, slice(steps.obs.shape[1], None)))
        with branches.fork():
            temperature_gradient, measured = self._measure(
                (first_error, second_error), weight, values, log_prob[:num_rows], log_temperature, self._target_entropy
            )
            assert nets.actor_weights.grad is not None
            nets.actor_weights.grad[:1].copy_(temperature_gradient)
            self._counters.metric_sums.add_(measured)
        branches.join()
        output = actor_pass[-1][:num_rows]
        d_output = self._through_head(d_actions[0] + d_actions[1], output, noise[:num_rows], log_temperature)
        self._actor.backward([part[:num_rows] for part in actor_pass], d_output)
        branches.join()
        self._descend(nets.actor_weights, nets.actor_optimizer, share)
        return (first_error + second_error) / 2

    def _of_each(self, networks: Sequence[WrittenMLP], x: Tensor) -> list[list[Tensor]]:
        """What each network makes of the same rows, at the same time."""
        first, second = networks
        with self._branches.fork():
            of_second = second.forward(x)
        return [first.forward(x), of_second]

    def _descend(self, weights: nn.Parameter, optimizer: torch.optim.Adam, share: float) -> None:
        assert weights.grad is not None
        average_over_learners_(self._group, weights.grad, share)
        # `found_inf` is how torch's own GradScaler tells a fused optimiser to skip a step, without asking the device.
        optimizer.found_inf = self._check(weights.grad, self._counters.num_bad_gradients)  # type: ignore[attr-defined]
        optimizer.step()


# ---------------------------------------------------------------------------------------------- one kernel each


def seen(obs: Tensor, next_obs: Tensor, terminated: Tensor) -> Tensor:
    """What the policy sees: every s_t, then every s_{t+1}; zeros where nothing follows, as in `critic_targets`."""
    return torch.cat([obs, torch.where(terminated[:, None] > 0, 0.0, next_obs)])


def act(rows: Tensor, output: Tensor, noise: Tensor) -> Tensor:
    """The policy's actions behind what it saw: rows for the critics."""
    mean, log_std = output.chunk(2, dim=1)
    return torch.cat([rows, (mean + log_std.clamp(*LOG_STD_LIMITS).exp() * noise).tanh()], dim=1)


def log_probs(output: Tensor, noise: Tensor) -> Tensor:
    mean, log_std = output.chunk(2, dim=1)
    return squashed_sample(mean, log_std, noise)[1]


def errors(
    values: tuple[Tensor, Tensor],
    next_values: tuple[Tensor, Tensor],
    next_log_prob: Tensor,
    columns: tuple[Tensor, Tensor, Tensor],
    log_temperature: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The errors Q_k(s, a) - y of both critics, [B], and the gradients of their loss, [B, 1].

    `columns` are the rewards, whether the steps terminated, and their weights in the loss.
    """
    reward, terminated, weight = columns
    # Soft value: V(s') = min_k Q_target_k(s', a') - alpha * log pi(a' | s')
    next_value = torch.minimum(*next_values)[:, 0] - log_temperature.exp() * next_log_prob
    # y = r + gamma * (1 - terminated) * V(s')
    target = reward + gamma * torch.where(terminated > 0, 0.0, next_value)
    first, second = (value[:, 0] - target for value in values)
    # J_Q = 0.5 * mean(w * sum_k (Q_k - y)^2), so dJ_Q / dQ_k = w (Q_k - y) / n
    factor = weight / len(reward)
    return first, second, (factor * first)[:, None], (factor * second)[:, None]


def gradients_of_smaller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of -mean(min_k Q_k) with respect to both critics; where they are equal, each has a half."""
    share_of_first = torch.where(first == second, 0.5, (first < second).float()) / len(first)
    return -share_of_first, share_of_first - 1 / len(first)


def head_gradient(d_action: Tensor, output: Tensor, noise: Tensor, log_temperature: Tensor) -> Tensor:
    """The gradient of J_pi = mean(alpha * log pi - min_k Q_k) with respect to the policy's output.

    `d_action` is the gradient of the second part with respect to the actions.
    """
    mean, log_std = output.chunk(2, dim=1)
    scaled_noise = log_std.clamp(*LOG_STD_LIMITS).exp() * noise
    action = (mean + scaled_noise).tanh()
    d_log_prob = log_temperature.exp() / len(output)
    # d a / d u = 1 - a^2,  d log pi / d u = 2 tanh(u) = 2 a,  and d log pi / d log std = -1 besides what u brings
    d_mean = d_action * (1 - action * action) + 2 * d_log_prob * action
    lowest, highest = LOG_STD_LIMITS
    is_free = (log_std >= lowest) & (log_std <= highest)
    return torch.cat([d_mean, (d_mean * scaled_noise - d_log_prob) * is_free], dim=1)


def measure(
    both_errors: tuple[Tensor, Tensor],
    weight: Tensor,
    values: tuple[Tensor, Tensor],
    log_prob: Tensor,
    log_temperature: Tensor,
    target_entropy: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of the temperature's loss, and the metrics."""
    first, second = both_errors
    critic_loss = 0.5 * (weight * (first.square() + second.square())).mean()
    entropy, value, temperature = -log_prob.mean(), torch.minimum(*values).mean(), log_temperature.exp()
    # J_pi = mean(alpha * log pi(a | s) - min_k Q_k(s, a))
    actor_loss = -temperature * entropy - value
    measured = (critic_loss, actor_loss, value, entropy, temperature, torch.ones_like(entropy))
    # J(log alpha) = log alpha * (H - H_target), whose gradient is H - H_target
    return (entropy - target_entropy)[None], torch.stack(measured)


def check(gradient: Tensor, num_bad_gradients: Tensor) -> Tensor:
    """1 if a gradient is not finite, which is counted, else 0."""
    # One number that is not finite makes the sum so too. A sum that overflows counts as bad as well.
    is_bad = (~gradient.sum().isfinite()).float()
    num_bad_gradients += is_bad
    return is_bad
