"""How DQN takes a gradient step: by torch's autograd, or in numpy with gradients written out (the fast learner)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freerun.algorithms.dqn.dqn_config import DQNConfig
from freerun.algorithms.dqn.q_networks import QNetworks
from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.algorithms.policies.action_heads import MASKED_LOGIT
from freerun.algorithms.policies.networks import step_if_finite
from freerun.algorithms.policies.numpy_mlp import FlatAdam, NumpyMLP, layers_of
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.step_counters import StepCounters
from freerun.core import Array, FloatArray, LearnerGroup
from freerun.cuda_graphs import fused, resolve_acceleration

METRICS = ("critic_loss", "q_mean")


class QStepParts(NamedTuple):
    """What gradient steps need, whoever computes them."""

    networks: QNetworks
    config: DQNConfig
    group: LearnerGroup
    counters: StepCounters


class QSteps(Protocol):
    """Takes gradient steps of the network; the target network follows."""

    def take(self, steps: StepBatch, weight: Tensor, share: float) -> Tensor:
        """Take one gradient step on these rows; return their TD errors.

        `weight` is the weight of each row in the loss. `share` is the share of the batch's rows that is here; other
        learners have the rest.
        """
        ...


class AutogradQSteps:
    """Torch computes the gradients: the reference, for any device."""

    def __init__(self, parts: QStepParts):
        self._networks, self._config, self._group, self._counters = parts
        acceleration = resolve_acceleration(parts.config.acceleration, parts.networks.weights.device)
        self._fused_targets = fused(parts.networks.targets, acceleration)
        self._fused_loss = fused(self._loss, acceleration)

    def take(self, steps: StepBatch, weight: Tensor, share: float) -> Tensor:
        nets, gradient = self._networks, self._networks.weights.grad
        assert gradient is not None
        loss, td_error, measured = self._fused_loss(steps, self._fused_targets(steps), weight)
        # All gradients go into one buffer, so that Adam steps in one kernel.
        gradients = torch.autograd.grad(loss, list(nets.online.parameters()))
        torch.cat([one.reshape(-1) for one in gradients], out=gradient)
        average_over_learners_(self._group, gradient, share)
        # Clip by norm: g <- g * min(1, max_norm / (|g| + 1e-6)). What is not finite stays so.
        gradient *= (self._config.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
        step_if_finite(nets.optimizer, gradient, self._counters.num_bad_gradients)
        nets.follow()
        self._counters.metric_sums += measured
        return td_error

    def _loss(self, steps: StepBatch, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """J = mean(w * huber(Q(s, a) - y)), the TD errors Q(s, a) - y, and the metrics."""
        value = self._networks.taken(steps)
        # huber(x) = 0.5 x^2 up to |x| = delta, then delta * (|x| - 0.5 delta): no large error dominates a batch.
        losses = torch.nn.functional.huber_loss(value, target, reduction="none", delta=self._config.huber_delta)
        loss = (weight * losses).mean()
        q_mean = value.detach().mean()
        return loss, value.detach() - target, torch.stack((loss.detach(), q_mean, torch.ones_like(q_mean)))


class FastQSteps:
    """Gradients written out in numpy, on a CPU.

    The loss is that of `AutogradQSteps`, and a test compares the two ways, setting by setting.
    """

    def __init__(self, parts: QStepParts):
        self._networks, self._config, self._group, self._counters = parts
        networks = parts.networks
        self._metric_sums = parts.counters.metric_sums.numpy()
        self._online, self._target = (
            NumpyMLP(layers_of(network), networks.spec.activation) for network in (networks.online, networks.target)
        )
        self._adam = FlatAdam(networks.weights, networks.optimizer)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is counted below
    def take(self, steps: StepBatch, weight: Tensor, share: float) -> Tensor:
        obs, action, reward, next_obs, terminated = (column.numpy() for column in steps)
        config, rows, choice = self._config, np.arange(len(reward)), action[:, 0].astype(np.int64)
        if self._networks.spec.has_mask:
            num_seen = self._networks.spec.obs_size
            obs, next_obs, next_masks = obs[:, :num_seen], next_obs[:, :num_seen], next_obs[:, num_seen:]
        next_values = self._values(self._target.forward(next_obs))
        chosen_by = self._values(self._online.forward(next_obs)) if config.double else next_values
        if self._networks.spec.has_mask:  # as in `QNetworks.targets`
            allowed = next_masks != 0
            chosen_by = np.where(allowed | ~allowed.any(axis=1, keepdims=True), chosen_by, np.float32(MASKED_LOGIT))
        next_value = next_values[rows, chosen_by.argmax(axis=1)]
        # Not as a product: where nothing follows, a value that is not finite must not count, and 0 * NaN is NaN.
        next_value[terminated >= 1] = 0.0
        target = reward + config.gamma * (1 - terminated) * next_value

        value = self._values(self._online.forward(obs))[rows, choice]
        error = value - target
        # huber(x) = x' (x - 0.5 x') with x' = clip(x, -delta, delta), which is also its slope: dJ / dQ = w * x' / n
        slope = np.clip(error, -config.huber_delta, config.huber_delta)
        d_value = weight.numpy() * slope / np.float32(len(reward))
        loss = float(np.dot(d_value, error - 0.5 * slope))
        self._online.backward(self._output_gradient(d_value, rows, choice))
        gradient = self._networks.weights.grad
        assert gradient is not None
        average_over_learners_(self._group, gradient, share)
        if not self._adam.step(config.max_grad_norm):
            self._counters.num_bad_gradients += 1
        self._networks.follow()
        self._metric_sums += (loss, float(value.mean()), 1.0)
        return torch.from_numpy(error)

    def _values(self, output: FloatArray) -> FloatArray:
        """`QNetworks.values`. The next forward pass may overwrite what it returns without duelling."""
        if not self._config.duelling:
            return output
        advantage = output[:, 1:]
        values: FloatArray = output[:, :1] + advantage - advantage.mean(axis=1, keepdims=True)
        return values

    def _output_gradient(self, d_value: FloatArray, rows: Array, choice: Array) -> FloatArray:
        """The gradient with respect to the network's outputs, given that of the values of the actions taken."""
        num_actions = self._networks.num_actions
        d_output = np.zeros((len(rows), num_actions + self._config.duelling), np.float32)
        if self._config.duelling:
            # Q_a = V + A_a - mean_k A_k:  dQ_a/dV = 1,  dQ_a/dA_k = [k = a] - 1 / num_actions
            d_output[:, 0] = d_value
            d_output[:, 1:] = (-d_value / num_actions)[:, None]
        d_output[rows, choice + self._config.duelling] += d_value
        return d_output
