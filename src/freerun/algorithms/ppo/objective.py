"""What PPO minimises: the clipped objective, corrected for data that older weights have collected."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freerun.algorithms.learners.shared_update import mean_or_zero
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch

ADVANTAGE_EPSILON = 1e-8
"""Added to the deviation of the advantages, which may all be equal."""
LEAST_FOR_KL, MOST_FOR_KL, KL_FACTOR = 1e-5, 1e-2, 1.5
"""How far and how fast --desired-kl moves the learning rate, as in RSL-RL."""


class PPOLosses(NamedTuple):
    """The losses of one minibatch."""

    total: Tensor
    """What the gradient is taken of."""
    policy_loss: Tensor
    value_loss: Tensor
    log_ratio: Tensor
    """log(pi / pi_proximal) of each row."""


def ppo_losses(
    net: ActorCritic, config: PPOConfig, minibatch: TrainingBatch, advantage_of_all: Tensor | None = None
) -> PPOLosses:
    """Where other learners have some of the minibatch's rows, `advantage_of_all` holds the advantages of all rows."""
    head, value = net.head_and_value(minibatch.obs)
    # log ratio = log pi(a | s) - log pi_proximal(a | s)
    log_ratio = net.log_prob(head, minibatch.action) - minibatch.proximal_log_prob

    advantage = minibatch.advantage
    of_all = advantage if advantage_of_all is None else advantage_of_all
    if config.normalizes_minibatches:
        advantage = normalized_advantage(advantage, of_all)

    # Decoupled objective (Hilton et al. 2022): L = -mean(w * clipped(ratio, A)), where w = pi_proximal / pi_behaviour
    objective = clipped_objective(log_ratio.exp(), advantage, config.clip_range)
    policy_loss = -mean_or_zero(minibatch.importance_weight * objective)
    # Value loss: mean((V(s_t) - target_t)^2)
    value_error = (value - minibatch.value_target).square()
    if config.value_clip is not None:
        value_error = torch.maximum(value_error, clipped_value_error(value, minibatch, config.value_clip))
    value_loss = mean_or_zero(value_error)
    # L = L_policy + c_value * L_value - c_entropy * mean(H(pi(. | s)))
    total = policy_loss + config.value_coef * value_loss
    if config.entropy_coef:
        total = total - config.entropy_coef * mean_or_zero(net.entropy(head))
    return PPOLosses(total, policy_loss.detach(), value_loss.detach(), log_ratio.detach())


def clipped_objective(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """PPO's surrogate of each step (Schulman et al. 2017, eq. 7): min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)


def normalized_advantage(advantage: Tensor, of_all: Tensor) -> Tensor:
    """(A - mean(A)) / (std(A) + eps), with the mean and the deviation of all rows, of which some may be elsewhere."""
    if len(of_all) <= 1:
        return advantage
    return (advantage - of_all.mean()) / (of_all.std() + ADVANTAGE_EPSILON)


def clipped_value_error(value: Tensor, minibatch: TrainingBatch, value_clip: float) -> Tensor:
    """(V_old + clip(V - V_old, -eps, eps) - target)^2 of each step, where V_old is the value before the update.

    The loss takes the larger of this and the plain error, so a value that has moved by eps towards its target gets no
    further gradient (OpenAI's baselines, and RSL-RL)."""
    moved = (value - minibatch.value).clamp(-value_clip, value_clip)
    return (minibatch.value + moved - minibatch.value_target).square()


def adapted_learning_rate(learning_rate: Tensor, kl: Tensor, desired_kl: float) -> Tensor:
    """A lower rate if the policy has moved more than twice as far as desired, a higher one if less than half as far."""
    lower, higher = learning_rate / KL_FACTOR, learning_rate * KL_FACTOR
    moved = torch.where(kl > 2 * desired_kl, lower, torch.where(kl < desired_kl / 2, higher, learning_rate))
    return moved.clamp(LEAST_FOR_KL, MOST_FOR_KL)


def policy_change(log_ratio: Tensor, clip_range: float) -> Tensor:
    """How far the policy has moved from the proximal one: the approximate KL divergence and the clipped fraction."""
    if not len(log_ratio):
        return torch.zeros(2, device=log_ratio.device)
    # The share of rows where |ratio - 1| > eps, so that the clipped term may hold the policy back.
    clip_fraction = ((log_ratio.exp() - 1).abs() > clip_range).float().mean()
    return torch.stack([approx_kl(log_ratio), clip_fraction])


def approx_kl(log_ratio: Tensor) -> Tensor:
    """KL(pi_proximal || pi) estimated as mean(ratio - 1 - log ratio), which is never below 0 (Schulman 2020, "k3")."""
    return (log_ratio.exp() - 1 - log_ratio).mean()
