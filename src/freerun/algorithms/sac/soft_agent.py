"""The agent of soft actor-critic: a policy, twin critics, a temperature, and the gradient step that trains them.

The formulas are those of Haarnoja et al. 2018b, "Soft Actor-Critic Algorithms and Applications".
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import average_over_learners_, join_shares, share_of_rows
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import (
    StackedMLP,
    flatten_parameters,
    mlp,
    squashed_sample,
    step_if_finite,
)
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import LearnerGroup, Metrics, SingleLearner
from freerun.cuda_graphs import fused, resolve_acceleration


class SoftPolicy(nn.Module):
    """The policy's network, and the temperature that is trained with it."""

    def __init__(self, spec: ActorSpec):
        super().__init__()
        # First, so that the temperature is the first number of the flat weights: `SoftAgent._step` relies on it.
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.net = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, output_gain=0.01)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] and their log-probabilities."""
        mean, log_std = self.net(obs).chunk(2, dim=1)
        return squashed_sample(mean, log_std, noise)


def critic_values(critics: StackedMLP, obs: Tensor, action: Tensor) -> Tensor:
    """Q(s, a) of both critics, [2, B]."""
    x = torch.cat([obs, action], dim=1)
    # expand makes a view: both critics read the same memory.
    values: Tensor = critics(x.expand(2, *x.shape)).squeeze(-1)
    return values


class SoftAgent:
    """Policy, twin critics and temperature. `learn` neither waits for the device nor moves a tensor.

    Several learners draw the same batch, and each computes the gradient of its share of the rows.
    """

    METRICS = ("critic_loss", "actor_loss", "q_mean", "entropy", "temperature")

    def __init__(
        self,
        spec: ActorSpec,
        config: SACConfig,
        seed: int,
        device: torch.device,
        learner_group: LearnerGroup | None = None,
    ):
        self._learner_group = learner_group or SingleLearner()
        self._share = 1 / self._learner_group.count  # this learner's share of the rows of the last batch
        self._config = config
        self._device = device
        self._num_actions = len(spec.low)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.soft_policy = SoftPolicy(spec)
            critics = StackedMLP(2, (spec.obs_size + self._num_actions, *spec.hidden_sizes, 1), torch.relu)
        self.soft_policy.to(device)
        self.critics = critics.to(device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._actor_weights = flatten_parameters(self.soft_policy)
        self._critic_weights = flatten_parameters(self.critics)
        self._target_weights = flatten_parameters(self.target_critics).requires_grad_(False)
        # capturable keeps Adam's step counter on the device, where a captured graph can advance it.
        self._actor_optimizer, self._critic_optimizer = (
            torch.optim.Adam([weights], config.learning_rate, fused=True, capturable=device.type == "cuda")
            for weights in (self._actor_weights, self._critic_weights)
        )
        # The usual heuristic: minus the number of actions (Haarnoja et al. 2018b, appendix D)
        self._target_entropy = -float(self._num_actions) if config.target_entropy is None else config.target_entropy
        self.generator = torch.Generator(device).manual_seed(seed)
        self._metric_sums = torch.zeros(len(self.METRICS) + 1, device=device)  # and the number of gradient steps
        self._num_bad_gradients = torch.zeros(1, device=device)
        acceleration = resolve_acceleration(config.acceleration, device)
        self._fused_targets = fused(self.critic_targets, acceleration)
        self._fused_critic_loss = fused(self._critic_loss, acceleration)
        self._fused_actor_loss = fused(self._actor_loss, acceleration)

    @property
    def weights(self) -> Tensor:
        """The temperature's logarithm and the policy's weights, end to end."""
        return self._actor_weights

    # ------------------------------------------------------------------------------------------ the gradient step

    def learn(self, sample: ReplaySample) -> Tensor:
        """Take one gradient step of critics, policy and temperature; returns the TD errors of the sample."""
        num_rows = len(sample.steps.reward)
        # For the whole batch, also where this learner computes a share of it: the generators of all stay in step.
        noise = torch.randn((2 * num_rows, self._num_actions), generator=self.generator, device=self._device)
        if self._learner_group.count > 1:
            sample, noise = self._share_of(sample, noise)
        steps = sample.steps

        action, log_prob, target = self._fused_targets(steps, noise)
        critic_loss, td_error = self._fused_critic_loss(steps.obs, steps.action, target, sample.weight)
        self._step(critic_loss, list(self.critics.parameters()), self._critic_weights, self._critic_optimizer)
        # Target critics: w_target <- (1 - tau) * w_target + tau * w
        self._target_weights.lerp_(self._critic_weights.detach(), self._config.target_rate)

        actor_loss, temperature_gradient, measured = self._fused_actor_loss(
            steps.obs, action, log_prob, critic_loss.detach()
        )
        parameters = list(self.soft_policy.net.parameters())
        self._step(actor_loss, parameters, self._actor_weights, self._actor_optimizer, first=temperature_gradient)
        self._metric_sums += measured
        if self._config.replay == "prioritised":
            td_error = join_shares(self._learner_group, td_error, num_rows)
        return td_error

    def _share_of(self, sample: ReplaySample, noise: Tensor) -> tuple[ReplaySample, Tensor]:
        """This learner's rows of a sample, and of the noise for both ends of its steps."""
        num_rows = len(sample.steps.reward)
        mine = share_of_rows(self._learner_group, num_rows)
        self._share = (mine.stop - mine.start) / num_rows
        steps = StepBatch(*(part[mine] for part in sample.steps))
        my_noise = noise.view(2, num_rows, -1)[:, mine].reshape(2 * len(steps.reward), -1)
        return ReplaySample(steps, sample.weight[mine], sample.rows), my_noise

    def critic_targets(self, steps: StepBatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions of the policy at s_t, their log-probabilities, and the targets y_t of the critics.

        One forward pass serves both ends of the steps: `noise` has a row for every s_t, then one for every s_{t+1}.
        """
        num_rows = len(steps.reward)
        action, log_prob = self.soft_policy(torch.cat([steps.obs, steps.next_obs]), noise)
        with torch.no_grad():
            # Soft value: V(s') = min_k Q_target_k(s', a') - alpha * log pi(a' | s')
            next_q = critic_values(self.target_critics, steps.next_obs, action[num_rows:]).amin(dim=0)
            next_value = next_q - self.soft_policy.log_temperature.exp() * log_prob[num_rows:]
            # y = r + gamma * (1 - terminated) * V(s'). Not as a product: where nothing follows, a value that is not
            # finite must not count either, and 0 * NaN is NaN.
            target = steps.reward + self._config.gamma * torch.where(steps.terminated > 0, 0.0, next_value)
        return action[:num_rows], log_prob[:num_rows], target

    def _critic_loss(self, obs: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """J_Q = 0.5 * mean(w * sum_k (Q_k(s, a) - y)^2), and the TD errors mean_k (Q_k(s, a) - y)."""
        error = critic_values(self.critics, obs, action) - target
        return 0.5 * (weight * error.square().sum(dim=0)).mean(), error.detach().mean(dim=0)

    def _actor_loss(
        self, obs: Tensor, action: Tensor, log_prob: Tensor, critic_loss: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's loss, the gradient of the temperature's loss, and the metrics."""
        # J_pi = mean(alpha * log pi(a | s) - min_k Q_k(s, a))
        temperature = self.soft_policy.log_temperature.detach().exp()
        # The smaller of both critics, against overestimation (Fujimoto et al. 2018, TD3)
        value = critic_values(self.critics, obs, action).amin(dim=0)
        loss = (temperature * log_prob - value).mean()
        # J(log alpha) = log alpha * (H - H_target), which is linear: its gradient is H - H_target
        # Descending it, alpha rises while the policy's entropy is below the target. H = -mean(log pi(a | s))
        entropy = -log_prob.detach().mean()
        temperature_gradient = entropy - self._target_entropy
        measured = (critic_loss, loss.detach(), value.detach().mean(), entropy, temperature, torch.ones_like(entropy))
        return loss, temperature_gradient, torch.stack(measured)

    def _step(
        self,
        loss: Tensor,
        parameters: Sequence[Tensor],
        weights: nn.Parameter,
        optimizer: torch.optim.Adam,
        first: Tensor | None = None,
    ) -> None:
        """Write all gradients into one buffer, `first` in front of them, and let Adam step in one kernel.

        Not by `backward`: the policy's loss depends on the critics, whose gradients it must not touch.
        """
        gradients = [gradient.reshape(-1) for gradient in torch.autograd.grad(loss, parameters)]
        assert weights.grad is not None
        torch.cat([first.reshape(1), *gradients] if first is not None else gradients, out=weights.grad)
        average_over_learners_(self._learner_group, weights.grad, self._share)
        step_if_finite(optimizer, weights.grad, self._num_bad_gradients)

    # ------------------------------------------------------------------------------------------ measuring

    def td_error(self, steps: StepBatch) -> Tensor:
        """How far the critics are off, per step, without learning from it."""
        with torch.no_grad():
            noise = torch.zeros((2 * len(steps.reward), self._num_actions), device=self._device)
            _, _, target = self.critic_targets(steps, noise)
            return (critic_values(self.critics, steps.obs, steps.action) - target).mean(dim=0)

    def metrics(self) -> Metrics:
        """Means over the gradient steps since the last call, and how many gradients were not finite."""
        average_over_learners_(self._learner_group, self._metric_sums, self._share)
        *sums, count, num_bad = torch.cat([self._metric_sums, self._num_bad_gradients]).tolist()
        self._metric_sums.zero_()
        self._num_bad_gradients.zero_()
        if not count:
            return {}
        means = {name: total / count for name, total in zip(self.METRICS, sums, strict=True)}
        return {**means, "bad_gradients": num_bad}

    # ------------------------------------------------------------------------------------------ exporting and keeping

    def export(self, policy: MLPActor) -> None:
        """Copy the policy's weights into the workers' policy."""
        weights = dict(self.soft_policy.net.named_parameters())
        policy.load(torch.cat([weights[name].detach().reshape(-1) for name in policy.arrays]).cpu().numpy())

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers by their names in `state_dict()`."""
        return {"actor_optimizer": self._actor_optimizer, "critic_optimizer": self._critic_optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {
            "actor": self._actor_weights.detach(),
            "critics": self._critic_weights.detach(),
            "targets": self._target_weights.detach(),
            "actor_optimizer": self._actor_optimizer.state_dict(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, weights in (
            ("actor", self._actor_weights),
            ("critics", self._critic_weights),
            ("targets", self._target_weights),
        ):
            weights.data.copy_(state[name])
        # Copies, because torch keeps the tensors that it is given.
        self._actor_optimizer.load_state_dict(copy.deepcopy(state["actor_optimizer"]))
        self._critic_optimizer.load_state_dict(copy.deepcopy(state["critic_optimizer"]))
        self.generator.set_state(state["generator"].cpu())
