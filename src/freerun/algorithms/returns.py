"""Advantages and policy objectives as pure functions on [T, B] or flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016, eq. 16), all [T, B].

    `next_value` is V of the true successor: where a step was truncated, V(final observation), which counts; where it
    terminated, it does not. Nothing flows back across the end of an episode.
    """
    delta = reward + gamma * next_value * ~terminated - value
    carry = gamma * gae_lambda * ~ended
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for step in reversed(range(len(delta))):
        running = delta[step] + carry[step] * running
        advantage[step] = running
    return advantage


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    rho: Tensor,
    gamma: float,
    trace_lambda: float,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1, with λ), all [T, B]: advantages, and what to add to V for its targets.

    `rho` is the importance weight of each step, truncated at 1, and serves as the paper's c too. Where it is 1
    everywhere, both results are `gae`, to the last bit.
    """
    delta = reward + gamma * next_value * ~terminated - value
    carry = gamma * trace_lambda * ~ended
    correction, advantage = torch.empty_like(delta), torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for step in reversed(range(len(delta))):
        advantage[step] = delta[step] + carry[step] * running
        running = rho[step] * (delta[step] + carry[step] * running)
        correction[step] = running
    return advantage, correction


def clipped_objective(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """PPO's surrogate per step (Schulman et al. 2017, eq. 7)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)


def proximal_log_prob(behaviour: Tensor, recomputed: Tensor, lag: Tensor) -> Tensor:
    """The proximal policy of the decoupled objective (Hilton et al. 2022): the weights at the start of the update.

    For a step without lag that is the policy which acted, so its own number is used: then nothing differs from
    plain PPO, to the last bit.
    """
    return torch.where(lag == 0, behaviour, recomputed)


def importance_weight(proximal: Tensor, behaviour: Tensor, limit: float) -> Tensor:
    """How much more likely the proximal policy was to act like this than the behaviour policy; exactly 1 at lag 0."""
    return (proximal - behaviour).exp().clamp(max=limit)


def approx_kl(log_ratio: Tensor) -> Tensor:
    """How far a policy has moved, from log-ratios on its own actions: mean(r − 1 − log r), never below 0."""
    return (log_ratio.exp() - 1 - log_ratio).mean()
