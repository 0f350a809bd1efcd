"""How SAC takes a gradient step: by torch's autograd, or in numpy with gradients written out (the fast learner)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.algorithms.policies.networks import step_if_finite
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_networks import SoftNetworks, critic_values
from freerun.core import LearnerGroup
from freerun.cuda_graphs import fused, resolve_acceleration

METRICS = ("critic_loss", "actor_loss", "q_mean", "entropy", "temperature")


class StepCounters:
    """What gradient steps add up on the device, so that no step waits for it."""

    def __init__(self, device: torch.device):
        self.metric_sums = torch.zeros(len(METRICS) + 1, device=device)
        """The sum of each metric over the gradient steps, and their number."""
        self.num_bad_gradients = torch.zeros(1, device=device)


class SoftSteps(Protocol):
    """Takes gradient steps of critics, policy and temperature."""

    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        """Take one gradient step on these rows; return their TD errors.

        `weight` is the weight of each row in the critics' loss. `noise` has a row for every s_t, then one for every
        s_{t+1}. `share` is the share of the batch's rows that is here; other learners have the rest.
        """
        ...


class AutogradSoftSteps:
    """Torch computes the gradients: the reference, for any device."""

    def __init__(
        self,
        networks: SoftNetworks,
        config: SACConfig,
        target_entropy: float,
        group: LearnerGroup,
        counters: StepCounters,
    ):
        self._networks = networks
        self._config = config
        self._target_entropy = target_entropy
        self._group = group
        self._counters = counters
        acceleration = resolve_acceleration(config.acceleration, networks.actor_weights.device)
        self._fused_targets = fused(networks.critic_targets, acceleration)
        self._fused_critic_loss = fused(self._critic_loss, acceleration)
        self._fused_actor_loss = fused(self._actor_loss, acceleration)

    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        nets = self._networks
        action, log_prob, target = self._fused_targets(steps, noise, self._config.gamma)
        critic_loss, td_error = self._fused_critic_loss(steps.obs, steps.action, target, weight)
        parameters = list(nets.critics.parameters())
        self._descend(critic_loss, parameters, nets.critic_weights, nets.critic_optimizer, share)
        # Target critics: w_target <- (1 - tau) * w_target + tau * w
        nets.target_weights.lerp_(nets.critic_weights.detach(), self._config.target_rate)

        actor_loss, temperature_gradient, measured = self._fused_actor_loss(
            steps.obs, action, log_prob, critic_loss.detach()
        )
        parameters = list(nets.policy.net.parameters())
        self._descend(
            actor_loss, parameters, nets.actor_weights, nets.actor_optimizer, share, first=temperature_gradient
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

    def _descend(
        self,
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
        average_over_learners_(self._group, weights.grad, share)
        step_if_finite(optimizer, weights.grad, self._counters.num_bad_gradients)
