"""Advantages and returns as pure functions on [T, B] tensors: T steps of B environments."""

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

    `next_value` is the value of the true successor. Where a step was truncated it is V(final observation), and it
    counts; where a step terminated it does not count. `ended` is terminated or truncated, or the end of a segment:
    nothing flows back from beyond.
    """
    # TD error: delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    delta = reward + gamma * next_value * ~terminated - value
    carry = gamma * gae_lambda * ~ended
    # A_t = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1}
    return discounted_sums(delta, carry)


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
    """V-trace with lambda (Espeholt et al. 2018, section 4.1), all [T, B]: advantages, and corrections to V(s_t).

    `rho` is the importance weight of each step, truncated at 1; lambda * rho is the paper's c. Where rho is 1
    everywhere, both results equal `gae` to the last bit.
    """
    # TD error: delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    delta = reward + gamma * next_value * ~terminated - value
    carry = gamma * trace_lambda * ~ended
    # v_t - V(s_t) = rho_t * (delta_t + gamma * lambda * (v_{t+1} - V(s_{t+1})))   (remark 1 of the paper)
    correction = discounted_sums(rho * delta, rho * carry)
    # A_t = delta_t + gamma * lambda * (v_{t+1} - V(s_{t+1})); with lambda 1 it is r_t + gamma * v_{t+1} - V(s_t),
    # the advantage of the paper's section 4.2. The policy loss multiplies it by rho_t.
    advantage = delta.clone()
    advantage[:-1] += carry[:-1] * correction[1:]
    return advantage, correction


def discounted_sums(term: Tensor, carry: Tensor) -> Tensor:
    """x_t = term_t + carry_t * x_{t+1}, backwards in time; nothing follows the last step."""
    if term.device.type == "cpu":
        # A step of numpy costs less than one of torch, and an episode may have thousands.
        sums, factors = term.numpy().copy(), carry.numpy()
        for step in range(len(sums) - 2, -1, -1):
            sums[step] += factors[step] * sums[step + 1]
        return torch.from_numpy(sums)
    result = term.clone()
    for step in reversed(range(len(term) - 1)):
        result[step] += carry[step] * result[step + 1]
    return result


def running_return(reward: Tensor, ended: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The discounted sum of the rewards up to each step, R_t = r_t + gamma * R_{t-1}, all [T, B].

    It restarts after an episode has ended, and takes the return before the first row as 0. The second result says
    how to correct that: with a return R before the first row, step t has R_t + weight_t * R.
    """
    factor = gamma * ~ended.roll(1, dims=0)
    factor[:1] = gamma
    if reward.device.type == "cpu":
        # As in `discounted_sums`. weight_t is the product of all factors so far.
        sums, factors = reward.numpy().copy(), factor.to(reward.dtype).numpy()
        for step in range(1, len(sums)):
            sums[step] += factors[step] * sums[step - 1]
        return torch.from_numpy(sums), torch.from_numpy(factors.cumprod(axis=0))
    returns, weights = torch.empty_like(reward), torch.empty_like(reward)
    # Zeros [B]; a slice and not reward[0], because a learner may have no rows.
    running = torch.zeros_like(reward[:1].sum(dim=0))
    weight = torch.ones_like(running)
    for step in range(len(reward)):
        # weight_t is gamma^(t + 1) until the first episode has ended, and 0 from then on.
        running, weight = reward[step] + factor[step] * running, factor[step] * weight
        returns[step], weights[step] = running, weight
    return returns, weights
