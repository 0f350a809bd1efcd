"""The gradient step of fast SAC, by autograd: large batches, wide critics, and a policy that may be deterministic."""

from __future__ import annotations

import torch
from torch import Tensor

from freerun.algorithms.fastsac.critic_heads import CriticHead, of_both
from freerun.algorithms.fastsac.fastsac_config import FastSACConfig
from freerun.algorithms.fastsac.obs_normalizer import ObsNormalizer
from freerun.algorithms.policies.networks import squashed_sample
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.soft_networks import critic_outputs
from freerun.algorithms.sac.soft_steps import StepParts, descend
from freerun.cuda_graphs import fused, resolve_acceleration


class LargeBatchSteps:
    """Takes gradient steps of the critics and, if it `trains_policy`, of policy and temperature."""

    def __init__(
        self,
        parts: StepParts,
        config: FastSACConfig,
        head: CriticHead,
        normalize: ObsNormalizer,
        trains_policy: bool = True,
    ):
        self._parts, self._config, self._head, self._normalize = parts, config, head, normalize
        self._networks, self._counters = parts.networks, parts.counters
        self._trains_policy = trains_policy
        self._is_deterministic = config.policy == "deterministic"
        self._device_type = parts.networks.actor_weights.device.type
        acceleration = resolve_acceleration(config.acceleration, parts.networks.actor_weights.device)
        self._fused_targets = fused(self._targets, acceleration)
        self._fused_critic_loss = fused(self._critic_loss, acceleration)
        self._fused_actor_loss = fused(self._actor_loss, acceleration)

    def take(self, steps: StepBatch, weight: Tensor, noise: Tensor, share: float) -> Tensor:
        nets, num_rows = self._networks, len(steps.reward)
        obs, target = self._fused_targets(steps, noise[num_rows:])
        critic_loss, td_error = self._fused_critic_loss(obs, steps.action, target, weight)
        parameters = list(nets.critics.parameters())
        descend(self._parts, critic_loss, parameters, nets.critic_weights, nets.critic_optimizer, share)
        # Target critics: w_target <- (1 - tau) * w_target + tau * w
        nets.target_weights.lerp_(nets.critic_weights.detach(), self._config.target_rate)
        if self._trains_policy:
            loss, temperature_gradient, measured = self._fused_actor_loss(obs, noise[:num_rows], critic_loss.detach())
            parameters = list(nets.policy.net.parameters())
            descend(
                self._parts, loss, parameters, nets.actor_weights, nets.actor_optimizer, share, temperature_gradient
            )
            self._counters.metric_sums += measured
        return td_error

    @torch.no_grad()
    def td_error(self, steps: StepBatch) -> Tensor:
        """How far the critics are off, per step, without learning from it."""
        obs, target = self._targets(steps, torch.zeros_like(steps.action))
        values = self._head.values(self._outputs(self._networks.critics, obs, steps.action))
        return values.mean(dim=0) - self._head.target_value(target)

    # ------------------------------------------------------------------------------------------ the losses

    @torch.no_grad()
    def _targets(self, steps: StepBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised observations s_t, and what the critics are to learn about them."""
        # Where nothing follows, an observation that is not finite must not count: 0 * NaN is NaN.
        next_obs = self._normalize(torch.where(steps.terminated[:, None] >= 1, 0.0, steps.next_obs))
        action, log_prob = self._act(next_obs, noise, smooths=True)
        bonus = -self._networks.policy.log_temperature.exp() * log_prob
        # y = R + gamma^k * (1 - terminated) * (Q_target(s', a') - alpha * log pi(a' | s')), see `n_step_returns`
        discount = self._config.gamma * (1 - steps.terminated)
        output = self._outputs(self._networks.target_critics, next_obs, action)
        return self._normalize(steps.obs), self._head.target(output, steps.reward, discount, bonus)

    def _critic_loss(self, obs: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of w * the losses of both critics, and the TD errors mean_k (Q_k(s, a) - y)."""
        output = self._outputs(self._networks.critics, obs, action)
        loss = (weight * self._head.loss(output, target).sum(dim=0)).mean()
        value = self._head.values(output.detach()).mean(dim=0)
        return loss, value - self._head.target_value(target)

    def _actor_loss(self, obs: Tensor, noise: Tensor, critic_loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's loss, the gradient of the temperature's loss, and the metrics."""
        action, log_prob = self._act(obs, noise)
        temperature = self._networks.policy.log_temperature.detach().exp()
        value = of_both(self._head.values(self._outputs(self._networks.critics, obs, action)), self._config.twins)
        # J_pi = mean(alpha * log pi(a | s) - Q(s, a)); log pi is 0 for a deterministic policy
        loss = (temperature * log_prob - value).mean()
        entropy = -log_prob.detach().mean()
        # J(log alpha) = log alpha * (H - H_target), whose gradient is H - H_target
        gradient = torch.zeros_like(entropy) if self._is_deterministic else entropy - self._parts.target_entropy
        measured = (critic_loss, loss.detach(), value.detach().mean(), entropy, temperature, torch.ones_like(entropy))
        return loss, gradient, torch.stack(measured)

    # ------------------------------------------------------------------------------------------ the networks

    def _act(self, obs: Tensor, noise: Tensor, smooths: bool = False) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] of the policy, and their log-probabilities, which are 0 for a deterministic one."""
        with self._autocast():
            output = self._networks.policy.net(obs)
        output = output.float()
        if not self._is_deterministic:
            mean, log_std = output.chunk(2, dim=1)
            return squashed_sample(mean, log_std, noise)
        action = output.tanh()
        if smooths:
            # Target policy smoothing (TD3): a' = clip(mu(s') + clip(noise, -c, c), -1, 1), so that the critics cannot
            # have narrow peaks that the policy would find.
            limit = self._config.smoothing_limit
            action = (action + (self._config.smoothing_std * noise).clamp(-limit, limit)).clamp(-1.0, 1.0)
        return action, torch.zeros_like(action[:, 0])

    def _outputs(self, critics: torch.nn.Module, obs: Tensor, action: Tensor) -> Tensor:
        with self._autocast():
            output = critic_outputs(critics, obs, action)  # type: ignore[arg-type]
        # Losses and distributions are computed with all digits.
        return output.float()

    def _autocast(self) -> torch.autocast:
        # Without its cache of cast weights, which would be filled while a graph is captured and be out of date later.
        return torch.autocast(
            self._device_type, torch.bfloat16, enabled=self._config.precision == "bf16", cache_enabled=False
        )
