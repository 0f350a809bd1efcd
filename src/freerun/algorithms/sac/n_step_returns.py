"""Returns over several steps, computed once when a segment arrives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStepReturns(NamedTuple):
    """For each step of a segment [T, B]: what the next steps bring, and where they end."""

    reward: Tensor
    """R_t = sum_{i<k} gamma^i r_{t+i}"""
    last: Tensor
    """The row of the segment that holds the last of the k steps. Its `next_obs` is where the value is taken."""
    lost: Tensor
    """1 - gamma^(k-1), and 1 where nothing follows: y_t = R_t + gamma * (1 - lost) * V(s_{t+k})."""


def n_step_returns(reward: Tensor, terminated: Tensor, truncated: Tensor, num_steps: int, gamma: float) -> NStepReturns:
    """Sum the rewards of up to `num_steps` steps, [T, B].

    The sum ends with the episode, and also with the segment: the steps after it may have been dropped, or are not
    there yet. The value of the real observation that follows then stands for the rest, with fewer steps before it.
    """
    length = len(reward)
    total = reward.clone()
    first = torch.arange(length, device=reward.device)[:, None].expand_as(reward)
    last = first.clone()
    ended = terminated.bool() | truncated.bool()
    goes_on = torch.ones_like(ended)
    for later in range(1, min(num_steps, length)):
        # Step t + later belongs to the sum of step t if no step from t to t + later - 1 has ended the episode.
        goes_on = goes_on[: length - later] & ~ended[later - 1 : length - 1]
        # Not as a product: a reward of another episode that is not finite must not count, and 0 * NaN is NaN.
        total[: length - later] += gamma**later * torch.where(goes_on, reward[later:], 0.0)
        last[: length - later] += goes_on
    lost = 1 - gamma ** (last - first).float()
    return NStepReturns(total, last, torch.where(terminated.bool().gather(0, last), 1.0, lost))
