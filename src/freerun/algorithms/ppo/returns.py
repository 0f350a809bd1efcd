"""Advantages and returns as pure functions on [T, B] tensors: T steps of B environments."""

from __future__ import annotations

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
    # The last addition is made as in `vtrace`, so that both agree to the last bit.
    return plus_next(delta, carry, discounted_sums(delta, carry))


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
    advantage = plus_next(delta, carry, correction)
    return advantage, rho * advantage


def plus_next(term: Tensor, carry: Tensor, later: Tensor) -> Tensor:
    """term_t + carry_t * later_{t+1}; nothing follows the last step."""
    result = term.clone()
    result[:-1] += carry[:-1] * later[1:]
    return result


def discounted_sums(term: Tensor, carry: Tensor) -> Tensor:
    """x_t = term_t + carry_t * x_{t+1}, backwards in time; nothing follows the last step. All [T, B].

    Sums over 1, 2, 4, ... steps are made of two sums of half that length (Hillis and Steele 1986), so it takes log2(T)
    passes over all steps. A loop over the steps would make T calls, and take milliseconds for a few long episodes.
    """
    sums, carry, span = term.clone(), carry.to(term.dtype, copy=True), 1
    while span < len(sums):
        # Here x_t sums up the terms of `span` steps from t on, and carry_t is the product of their carries.
        sums[:-span] += carry[:-span] * sums[span:]
        carry[:-span] = carry[:-span] * carry[span:]
        span *= 2
    return sums


def running_return(reward: Tensor, ended: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The discounted sum of the rewards up to each step, R_t = r_t + gamma * R_{t-1}, all [T, B].

    It restarts after an episode has ended, and takes the return before the first row as 0. The second result says
    how to correct that: with a return R before the first row, step t has R_t + weight_t * R.
    """
    factor = gamma * ~ended.roll(1, dims=0)
    factor[:1] = gamma
    # The same sums as above, forwards in time. weight_t is the product of all factors so far.
    returns = discounted_sums(reward.flip(0), factor.flip(0)).flip(0)
    return returns, factor.to(reward.dtype).cumprod(dim=0)
