"""The networks of DQN: one that learns the values of actions, and a target network that follows it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from freerun.algorithms.dqn.dqn_config import DQNConfig
from freerun.algorithms.learners.sliced_adam import SlicedAdam
from freerun.algorithms.policies.action_heads import MASKED_LOGIT
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import flatten_parameters, mlp
from freerun.algorithms.sac.replay_buffer import StepBatch


class QNetworks:
    """Both networks, with their weights laid end to end, and the optimiser."""

    def __init__(self, spec: ActorSpec, config: DQNConfig, seed: int, device: torch.device):
        self.spec, self._config = spec, config
        self.num_actions = spec.output_size
        sizes = (spec.obs_size, *spec.hidden_sizes, self.num_actions + config.duelling)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            online = mlp(sizes, spec.activation, output_gain=1.0)
            for layer in online:
                if isinstance(layer, nn.Linear):
                    # Weights and biases ~ U(-1 / sqrt(inputs), 1 / sqrt(inputs)), torch's own choice and that of
                    # Stable-Baselines3. PPO's orthogonal weights are larger, and the values of CartPole collapsed more
                    # often with them.
                    layer.reset_parameters()
        self.online = online.to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.weights = flatten_parameters(self.online)
        self.target_weights = flatten_parameters(self.target).requires_grad_(False)
        self.optimizer = SlicedAdam(self.weights, config.learning_rate)
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        """Gradient steps so far. On the device, where a captured graph can advance it."""
        self._move = torch.tensor(config.target_rate, device=device)

    def output(self, network: nn.Module, rows: Tensor) -> Tensor:
        """A network's output for whole observations [B, row_size], of which it does not see the mask."""
        seen = rows[:, : self.spec.obs_size] if self.spec.has_mask else rows
        return network(seen)  # type: ignore[no-any-return]

    def values(self, output: Tensor) -> Tensor:
        """Q(s, a) of all actions [B, actions], from a network's output."""
        if not self._config.duelling:
            return output
        # Wang et al. 2016, equation 9: Q = V + A - mean_a A, where the first output is V.
        advantage = output[:, 1:]
        return output[:, :1] + advantage - advantage.mean(dim=1, keepdim=True)

    @torch.no_grad()
    def targets(self, steps: StepBatch) -> Tensor:
        """What the values of the actions taken are to become, [B]."""
        # Where nothing follows, an observation that is not finite must not count: 0 * NaN is NaN.
        next_obs = torch.where(steps.terminated[:, None] >= 1, 0.0, steps.next_obs)
        next_values = self.values(self.output(self.target, next_obs))
        # Double DQN (van Hasselt et al. 2016): a' = argmax Q(s', a), and its value is Q_target(s', a').
        chosen_by = self.values(self.output(self.online, next_obs)) if self._config.double else next_values
        if self.spec.has_mask:
            # Only actions that are allowed in s' can follow. All of them may where an episode has no mask at its end.
            allowed = next_obs[:, -self.num_actions :] != 0
            allowed = allowed | ~allowed.any(dim=1, keepdim=True)
            chosen_by = torch.where(allowed, chosen_by, MASKED_LOGIT)
        next_value = next_values.gather(1, chosen_by.argmax(dim=1, keepdim=True)).squeeze(1)
        # y = R + gamma^k * (1 - terminated) * Q_target(s', a'), see `n_step_returns`
        return steps.reward + self._config.gamma * (1 - steps.terminated) * next_value

    def taken(self, steps: StepBatch) -> Tensor:
        """Q(s, a) of the actions taken, [B]."""
        return self.values(self.output(self.online, steps.obs)).gather(1, steps.action.long()).squeeze(1)

    def follow(self) -> None:
        """After a gradient step: w_target <- (1 - tau) * w_target + tau * w, if that is due now."""
        self.num_steps += 1
        # Decided on the device, so that one captured graph serves the steps with and without a move.
        is_due = self.num_steps % self._config.target_interval == 0
        self.target_weights.lerp_(self.weights.detach(), torch.where(is_due, self._move, 0.0))

    def policy_arrays(self) -> dict[str, Tensor]:
        """The weights of a plain MLP that gives the values of all actions, by their names there."""
        arrays = {name: parameter.detach() for name, parameter in self.online.named_parameters()}
        if self._config.duelling:
            # V and A are linear in the last hidden layer, and so is their sum: its weights are sums of theirs.
            for name in list(arrays)[-2:]:
                value, advantage = arrays[name][:1], arrays[name][1:]
                arrays[name] = value + advantage - advantage.mean(dim=0, keepdim=True)
        return arrays
