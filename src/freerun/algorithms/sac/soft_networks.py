"""The networks of soft actor-critic: a policy with its temperature, twin critics, and target critics.

The formulas are those of Haarnoja et al. 2018b, "Soft Actor-Critic Algorithms and Applications".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from freerun.algorithms.learners.sliced_adam import SlicedAdam
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import StackedMLP, flatten_parameters, mlp, squashed_sample
from freerun.algorithms.sac.replay_buffer import StepBatch


class SoftPolicy(nn.Module):
    """The policy's network, and the temperature that is trained with it."""

    def __init__(self, spec: ActorSpec, temperature: float = 1.0):
        super().__init__()
        # First, so that the temperature is the first number of the flat weights: the gradient steps rely on it.
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.net = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, output_gain=0.01)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] and their log-probabilities."""
        mean, log_std = self.net(obs).chunk(2, dim=1)
        return squashed_sample(mean, log_std, noise)


def critic_outputs(critics: StackedMLP, obs: Tensor, action: Tensor) -> Tensor:
    """What both critics say about (s, a), [2, B, outputs]."""
    x = torch.cat([obs, action], dim=1)
    # expand makes a view: both critics read the same memory.
    outputs: Tensor = critics(x.expand(2, *x.shape))
    return outputs


def critic_values(critics: StackedMLP, obs: Tensor, action: Tensor) -> Tensor:
    """Q(s, a) of both critics, [2, B]."""
    return critic_outputs(critics, obs, action).squeeze(-1)


class SoftNetworks:
    """All networks of an agent, with their weights laid end to end, and the optimisers of those that learn."""

    def __init__(
        self,
        spec: ActorSpec,
        learning_rate: float,
        seed: int,
        device: torch.device,
        temperature: float = 1.0,
        num_critic_outputs: int = 1,
        critic_activation: Callable[[Tensor], Tensor] = torch.relu,
    ):
        self.spec = spec
        self.num_actions = len(spec.low)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = SoftPolicy(spec, temperature)
            critic_sizes = (spec.obs_size + self.num_actions, *spec.hidden_sizes, num_critic_outputs)
            critics = StackedMLP(2, critic_sizes, critic_activation)
        self.policy.to(device)
        self.critics = critics.to(device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor_weights = flatten_parameters(self.policy)
        self.critic_weights = flatten_parameters(self.critics)
        self.target_weights = flatten_parameters(self.target_critics).requires_grad_(False)
        self.actor_optimizer = SlicedAdam(self.actor_weights, learning_rate)
        self.critic_optimizer = SlicedAdam(self.critic_weights, learning_rate)

    def critic_targets(self, steps: StepBatch, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Actions of the policy at s_t, their log-probabilities, and the targets y_t of the critics.

        One forward pass serves both ends of the steps: `noise` has a row for every s_t, then one for every s_{t+1}.
        """
        num_rows = len(steps.reward)
        # Where nothing follows, an observation that is not finite must not count. As it has a part in the forward pass,
        # it would make the policy's gradient NaN, though its own gradient is 0: 0 * NaN is NaN.
        next_obs = torch.where(steps.terminated[:, None] > 0, 0.0, steps.next_obs)
        action, log_prob = self.policy(torch.cat([steps.obs, next_obs]), noise)
        with torch.no_grad():
            # Soft value: V(s') = min_k Q_target_k(s', a') - alpha * log pi(a' | s')
            next_q = critic_values(self.target_critics, next_obs, action[num_rows:]).amin(dim=0)
            next_value = next_q - self.policy.log_temperature.exp() * log_prob[num_rows:]
            # y = r + gamma * (1 - terminated) * V(s')
            target = steps.reward + gamma * torch.where(steps.terminated > 0, 0.0, next_value)
        return action[:num_rows], log_prob[:num_rows], target
