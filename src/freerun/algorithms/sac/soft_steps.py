"""How SAC takes a gradient step: by torch's autograd, or in numpy with gradients written out (the fast learner)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.algorithms.policies.action_heads import LOG_SQRT_2PI, LOG_STD_LIMITS
from freerun.algorithms.policies.networks import step_if_finite
from freerun.algorithms.policies.numpy_mlp import FlatAdam, NumpyMLP, layers_of, layers_of_each
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_networks import SoftNetworks, critic_values
from freerun.algorithms.sac.step_counters import StepCounters
from freerun.core import FloatArray, LearnerGroup
from freerun.cuda_graphs import fused, resolve_acceleration

METRICS = ("critic_loss", "actor_loss", "q_mean", "entropy", "temperature")


class StepParts(NamedTuple):
    """What gradient steps need, whoever computes them."""

    networks: SoftNetworks
    config: SACConfig
    target_entropy: float
    group: LearnerGroup
    counters: StepCounters


class SoftSteps(Protocol):
    """Takes gradient steps of critics, policy and temperature."""

    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        """Take one gradient step on these rows; return their TD errors.

        `weight` is the weight of each row in the critics' loss. `noise` has a row for every s_t, then one for every
        s_{t+1}. `share` is the share of the batch's rows that is here; other learners have the rest.
        """
        ...


def descend(
    parts: StepParts,
    loss: Tensor,
    parameters: Sequence[Tensor],
    weights: nn.Parameter,
    optimizer: torch.optim.Adam,
    share: float,
    first: Tensor | None = None,
) -> None:
    """Write all gradients into one buffer, `first` in front of them, and let Adam step in one kernel.

    Not by `backward`: the policy's loss depends on the critics, whose gradients it must not touch.
    """
    gradients = [gradient.reshape(-1) for gradient in torch.autograd.grad(loss, parameters)]
    assert weights.grad is not None
    torch.cat([first.reshape(1), *gradients] if first is not None else gradients, out=weights.grad)
    average_over_learners_(parts.group, weights.grad, share)
    step_if_finite(optimizer, weights.grad, parts.counters.num_bad_gradients)


class AutogradSoftSteps:
    """Torch computes the gradients: the reference, for any device."""

    def __init__(self, parts: StepParts):
        self.parts = parts
        self._networks, self._config, self._target_entropy, _, self._counters = parts
        acceleration = resolve_acceleration(parts.config.acceleration, parts.networks.actor_weights.device)
        self._fused_targets = fused(parts.networks.critic_targets, acceleration)
        self._fused_critic_loss = fused(self._critic_loss, acceleration)
        self._fused_actor_loss = fused(self._actor_loss, acceleration)

    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        nets = self._networks
        action, log_prob, target = self._fused_targets(steps, noise, self._config.gamma)
        critic_loss, td_error = self._fused_critic_loss(steps.obs, steps.action, target, weight)
        parameters = list(nets.critics.parameters())
        descend(self.parts, critic_loss, parameters, nets.critic_weights, nets.critic_optimizer, share)
        # Target critics: w_target <- (1 - tau) * w_target + tau * w
        nets.target_weights.lerp_(nets.critic_weights.detach(), self._config.target_rate)

        actor_loss, temperature_gradient, measured = self._fused_actor_loss(
            steps.obs, action, log_prob, critic_loss.detach()
        )
        parameters = list(nets.policy.net.parameters())
        descend(
            self.parts, actor_loss, parameters, nets.actor_weights, nets.actor_optimizer, share, temperature_gradient
        )
        self._counters.metric_sums += measured
        return td_error

    def _critic_loss(self, obs: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """J_Q = 0.5 * mean(w * sum_k (Q_k(s, a) - y)^2), and the TD errors mean_k (Q_k(s, a) - y)."""
        error = critic_values(self._networks.critics, obs, action) - target
        return 0.5 * (weight * error.square().sum(dim=0)).mean(), error.detach().mean(dim=0)

    def _actor_loss(
        self, obs: Tensor, action: Tensor, log_prob: Tensor, critic_loss: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's loss, the gradient of the temperature's loss, and the metrics."""
        # J_pi = mean(alpha * log pi(a | s) - min_k Q_k(s, a))
        temperature = self._networks.policy.log_temperature.detach().exp()
        # The smaller of both critics, against overestimation (Fujimoto et al. 2018, TD3)
        value = critic_values(self._networks.critics, obs, action).amin(dim=0)
        loss = (temperature * log_prob - value).mean()
        # J(log alpha) = log alpha * (H - H_target), which is linear: its gradient is H - H_target
        # Descending it, alpha rises while the policy's entropy is below the target. H = -mean(log pi(a | s))
        entropy = -log_prob.detach().mean()
        temperature_gradient = entropy - self._target_entropy
        measured = (critic_loss, loss.detach(), value.detach().mean(), entropy, temperature, torch.ones_like(entropy))
        return loss, temperature_gradient, torch.stack(measured)


class FastSoftSteps:
    """Gradients written out in numpy, on a CPU.

    The losses are those of `AutogradSoftSteps`, and a test compares the two ways, setting by setting.
    """

    def __init__(self, parts: StepParts):
        self._networks, self._config, self._target_entropy, self._group, self._counters = parts
        networks = parts.networks
        self._metric_sums = parts.counters.metric_sums.numpy()
        self._actor = NumpyMLP(layers_of(networks.policy.net), networks.spec.activation)
        self._critics = [NumpyMLP(layers, "relu") for layers in layers_of_each(networks.critics)]
        self._target_critics = [
            NumpyMLP(layers, "relu", memory_of=critic)
            for layers, critic in zip(layers_of_each(networks.target_critics), self._critics, strict=True)
        ]
        self._head = SquashedGradient()
        self._actor_adam = FlatAdam(networks.actor_weights, networks.actor_optimizer)
        self._critic_adam = FlatAdam(networks.critic_weights, networks.critic_optimizer)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is counted by `_descend`
    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        obs, action, reward, next_obs, terminated = (part.numpy() for part in steps)
        num_rows = len(reward)
        noise_of_both = noise.numpy()
        temperature = float(np.exp(self._networks.policy.log_temperature.item()))

        # Soft value: V(s') = min_k Q_target_k(s', a') - alpha * log pi(a' | s')
        next_action, next_log_prob = self._head.sample(self._actor.forward(next_obs), noise_of_both[num_rows:])
        next_input = np.concatenate([next_obs, next_action], axis=1)
        first, second = (critic.forward(next_input)[:, 0] for critic in self._target_critics)
        next_value = np.minimum(first, second) - temperature * next_log_prob
        # y = r + gamma * (1 - terminated) * V(s'). Not as a product: where nothing follows, a value that is not finite
        # must not count either, and 0 * NaN is NaN.
        next_value[terminated > 0] = 0.0
        target = reward + self._config.gamma * next_value
        critic_loss, td_error = self._critic_step(np.concatenate([obs, action], axis=1), target, weight.numpy(), share)
        # Target critics: w_target <- (1 - tau) * w_target + tau * w
        self._networks.target_weights.lerp_(self._networks.critic_weights.detach(), self._config.target_rate)

        # After the pass at s', whose memory this one takes over: the backward pass below is of this one.
        policy_action, log_prob = self._head.sample(self._actor.forward(obs), noise_of_both[:num_rows])
        entropy = -float(log_prob.mean())
        value = self._actor_step(obs, policy_action, entropy, temperature, share)
        self._metric_sums += (critic_loss, -temperature * entropy - value, value, entropy, temperature, 1.0)
        return torch.from_numpy(td_error)

    def _critic_step(
        self, critic_input: FloatArray, target: FloatArray, weight: FloatArray, share: float
    ) -> tuple[float, FloatArray]:
        """Take a step down J_Q = 0.5 * mean(w * sum_k (Q_k - y)^2); return J_Q and the TD errors mean_k (Q_k - y)."""
        num_rows = len(target)
        loss = 0.0
        td_error = np.zeros_like(target)
        for critic in self._critics:
            error = critic.forward(critic_input)[:, 0] - target
            # dJ_Q / dQ_k = w (Q_k - y) / n
            d_value = weight * error
            d_value /= num_rows
            critic.backward(d_value[:, None])
            loss += 0.5 * float(np.dot(d_value, error))
            td_error += error
        td_error /= len(self._critics)
        self._descend(self._critic_adam, self._networks.critic_weights, share)
        return loss, td_error

    def _actor_step(
        self, obs: FloatArray, action: FloatArray, entropy: float, temperature: float, share: float
    ) -> float:
        """Take a step down J_pi = mean(alpha * log pi - min_k Q_k) and the temperature's loss; return mean(min_k Q_k).

        `action` is the policy's own, from the last forward pass of the actor.
        """
        num_rows, num_inputs = len(obs), obs.shape[1]
        critic_input = np.concatenate([obs, action], axis=1)
        first, second = (critic.forward(critic_input)[:, 0] for critic in self._critics)
        # Only the smaller critic of a row has a gradient, so each critic goes back through its own rows. Where both are
        # equal, autograd gives each one half; here the first has all.
        is_first = first <= second
        d_action = np.empty_like(action)
        for critic, is_mine in zip(self._critics, (is_first, ~is_first), strict=True):
            rows = np.flatnonzero(is_mine)
            d_value = np.full((len(rows), 1), -1 / num_rows, np.float32)
            d_action[rows] = critic.input_gradient(d_value, rows, slice(num_inputs, None))
        self._actor.backward(self._head.backward(d_action, temperature / num_rows))
        weights = self._networks.actor_weights
        assert weights.grad is not None
        # J(log alpha) = log alpha * (H - H_target), whose gradient is H - H_target
        weights.grad[0] = entropy - self._target_entropy
        self._descend(self._actor_adam, weights, share)
        return float(np.minimum(first, second).mean())

    def _descend(self, optimizer: FlatAdam, weights: nn.Parameter, share: float) -> None:
        assert weights.grad is not None
        average_over_learners_(self._group, weights.grad, share)
        if not optimizer.step():
            self._counters.num_bad_gradients += 1


class SquashedGradient:
    """`networks.squashed_sample` with its gradient: a = tanh(u), u = mean + std * noise."""

    def sample(self, output: FloatArray, noise: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Actions [B, A] and their log-probabilities [B], given the actor's output. Keeps what `backward` needs."""
        num_actions = noise.shape[1]
        mean, self._raw_log_std = output[:, :num_actions], output[:, num_actions:]
        log_std = np.clip(self._raw_log_std, *LOG_STD_LIMITS)
        self._scaled_noise = np.exp(log_std) * noise
        unsquashed = mean + self._scaled_noise
        self._action = np.tanh(unsquashed)
        # log(1 - tanh(u)^2) = 2 * (log 2 - |u| - log(1 + exp(-2 |u|))), which keeps its digits at large |u|
        size = np.abs(unsquashed)
        log_slope = 2 * (math.log(2) - size - np.log1p(np.exp(-2 * size)))
        # log pi(a) = sum(log N(u; mean, std) - log(1 - tanh(u)^2))
        log_probs = -0.5 * noise * noise - log_std - log_slope
        # The sum over actions as a product, which BLAS does faster.
        log_prob: FloatArray = np.dot(log_probs, np.ones(num_actions, np.float32)) - LOG_SQRT_2PI * num_actions
        return self._action, log_prob

    def backward(self, d_action: FloatArray, d_log_prob: float) -> FloatArray:
        """The gradient of sum(d_action * a) + d_log_prob * sum(log pi) with respect to the actor's output."""
        # d a / d u = 1 - a^2,  d log pi / d u = 2 tanh(u) = 2 a,  and d log pi / d log std = -1 besides what u brings
        d_mean = d_action * (1 - self._action * self._action) + (2 * d_log_prob) * self._action
        d_log_std = d_mean * self._scaled_noise - d_log_prob
        lowest, highest = LOG_STD_LIMITS
        d_log_std *= (self._raw_log_std >= lowest) & (self._raw_log_std <= highest)
        return np.concatenate([d_mean, d_log_std], axis=1)
