"""Torch networks and the log-probabilities of their actions; `actor.py` computes the same in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from freerun.algorithms.actor import NORMALIZED_LIMIT, Activation, ActorSpec
from freerun.algorithms.heads import LOG_SQRT_2PI, LOG_STD_LIMITS
from freerun.core import Policy


def mlp(sizes: Sequence[int], activation: Activation, output_gain: float) -> nn.Sequential:
    """Linear layers with orthogonal weights, as PPO implementations start them."""
    layers: list[nn.Module] = []
    for layer, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(num_in, num_out)
        last = layer == len(sizes) - 2
        nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not last:
            layers.append(nn.Tanh() if activation == "tanh" else nn.ReLU())
    return nn.Sequential(*layers)


def heal(gradient: Tensor, num_bad: Tensor) -> None:
    """One that is not finite becomes zero where it is not, so that no weight is lost; and is counted."""
    num_bad += ~gradient.sum().isfinite()
    gradient.nan_to_num_(0.0, 0.0, 0.0)


def share_one_buffer(module: nn.Module) -> nn.Parameter:
    """Lay all weights, and all gradients, end to end and return them as one parameter.

    Clipping, Adam and zeroing then cost one call each instead of one per layer: a third of a small gradient step.
    """
    parameters = list(module.parameters())
    whole = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    whole.grad = torch.zeros_like(whole)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.data = whole.data[start:end].view_as(parameter)
        parameter.grad = whole.grad[start:end].view_as(parameter)
        start = end
    return whole


class StackedMLP(nn.Module):
    """Networks of one shape computed together, one batched product per layer: [K, B, inputs] -> [K, B, outputs]."""

    def __init__(self, num_nets: int, sizes: Sequence[int], activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self._activation = activation
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for num_in, num_out in itertools.pairwise(sizes):
            limit = 1 / math.sqrt(num_in)
            self.weights.append(torch.empty(num_nets, num_in, num_out).uniform_(-limit, limit))
            self.biases.append(torch.zeros(num_nets, 1, num_out))

    def forward(self, x: Tensor) -> Tensor:
        return stacked_forward(x, list(self.weights), list(self.biases), self._activation)


def stacked_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Callable[[Tensor], Tensor]
) -> Tensor:
    last = len(weights) - 1
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(bias, x, weight)
        if layer < last:
            x = activation(x)
    return x


class ActorCritic(nn.Module):
    """A policy and a value function without shared layers, behind one observation normaliser."""

    obs_mean: Tensor
    obs_scale: Tensor

    def __init__(self, spec: ActorSpec, make: Callable[[int], nn.Module] | None = None):
        """`make` builds the user's own network with so many outputs, in place of an MLP."""
        super().__init__()
        self.spec = spec
        if make is None:
            self.actor: nn.Module = mlp((spec.obs_size, *spec.hidden_sizes, spec.output_size), spec.activation, 0.01)
            self.critic: nn.Module = mlp((spec.obs_size, *spec.hidden_sizes, 1), spec.activation, 1.0)
        else:
            self.actor, self.critic = make(spec.output_size), make(1)
        if spec.gaussian_size:
            self.log_std = nn.Parameter(torch.zeros(spec.gaussian_size))
        self.register_buffer("obs_mean", torch.zeros(spec.obs_size))
        self.register_buffer("obs_scale", torch.ones(spec.obs_size))

    def normalize(self, obs: Tensor) -> Tensor:
        if not self.spec.normalize_obs:
            return obs
        return ((obs - self.obs_mean) * self.obs_scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def value(self, normalized_obs: Tensor) -> Tensor:
        return self.critic(normalized_obs).squeeze(-1)  # type: ignore[no-any-return]

    def log_prob(self, head: Tensor, action: Tensor) -> Tensor:
        """Of actions under the actor's output `head`."""
        if self.spec.gaussian_size:
            return gaussian_log_prob(head, self.log_std, action)
        return categorical_log_prob(head, self.spec.categories, action[:, None].flatten(1))

    def entropy(self, head: Tensor) -> Tensor:
        if self.spec.gaussian_size:
            return gaussian_entropy(self.log_std).expand(len(head))
        return categorical_entropy(head, self.spec.categories)

    def export(self, actor: Policy) -> None:
        """Copy the policy's weights and the normaliser into the workers' actor."""
        arrays = {"obs_mean": self.obs_mean, "obs_scale": self.obs_scale, **self.actor.state_dict()}
        if self.spec.gaussian_size:
            arrays["log_std"] = self.log_std
        actor.load(torch.cat([arrays[name].detach().reshape(-1) for name in actor.arrays]).cpu().numpy())


def categorical_log_prob(logits: Tensor, categories: Sequence[int], action: Tensor) -> Tensor:
    """Joint log-probability of independent categories; action [N, number of categories]."""
    log_prob = logits.new_zeros(len(logits))
    for column, part in enumerate(torch.split(logits, list(categories), dim=1)):
        log_prob = log_prob + part.log_softmax(dim=1).gather(1, action[:, column : column + 1]).squeeze(1)
    return log_prob


def categorical_entropy(logits: Tensor, categories: Sequence[int]) -> Tensor:
    entropy = logits.new_zeros(len(logits))
    for part in torch.split(logits, list(categories), dim=1):
        log_probs = part.log_softmax(dim=1)
        entropy = entropy - (log_probs.exp() * log_probs).sum(dim=1)
    return entropy


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Log-probability under a diagonal Gaussian."""
    deviation = (action - mean) * (-log_std).exp()
    log_prob: Tensor = -0.5 * deviation.square().sum(dim=1) - (log_std.sum() + LOG_SQRT_2PI * len(log_std))
    return log_prob


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions of a squashed Gaussian in [-1, 1], and their log-probabilities (Haarnoja et al. 2018, appendix C)."""
    log_std = log_std.clamp(*LOG_STD_LIMITS)
    chosen = mean + log_std.exp() * noise
    # log(1 − tanh²(u)) without the loss of digits at large |u|.
    log_slope = 2 * (math.log(2) - chosen - nn.functional.softplus(-2 * chosen))
    log_prob = -0.5 * noise.square() - log_std - LOG_SQRT_2PI - log_slope
    return chosen.tanh(), log_prob.sum(dim=-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    return torch.sum(log_std + 0.5 + LOG_SQRT_2PI)
