"""What minibatches are drawn from: the steps of an update with their advantages and value targets.

Segments come in two layouts, and each becomes the same `TrainingBatch`. A `FlatBatch` holds segments of any length, as
flat rows with a map back to time. A `TensorGrid` holds the segments of tensor environments as they are, [T, B, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.flat_batch import FlatBatch
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.returns import gae, vtrace
from freerun.core import TensorSegment


class TrainingBatch(NamedTuple):
    """N rows that stay as they are while the networks change."""

    obs: Tensor
    """[N, observation], normalised."""
    action: Tensor
    proximal_log_prob: Tensor
    """Under the weights at the start of the update."""
    importance_weight: Tensor
    """pi_proximal / pi_behaviour, truncated; exactly 1 without lag."""
    advantage: Tensor
    value_target: Tensor

    def select(self, rows: Tensor) -> TrainingBatch:
        """A minibatch."""
        return TrainingBatch(*(column[rows] for column in self))


class TensorGrid(NamedTuple):
    """The segments of tensor environments side by side, [T, B, ...].

    All segments have one length, so there are no gaps: nothing here depends on the data, the host never waits for the
    device, and the whole computation can be captured in a CUDA graph.
    """

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    ended: Tensor
    next_obs: Tensor
    lag: Tensor
    """[B]: a tensor segment was collected with one version of the weights."""

    @classmethod
    def of(cls, segments: Sequence[TensorSegment], device: torch.device, version: int) -> TensorGrid:
        def side_by_side(name: str) -> Tensor:
            parts = [getattr(segment, name) for segment in segments]
            return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(device)

        lags = [
            torch.full((segment.reward.shape[1],), version - segment.version, device=device) for segment in segments
        ]
        return cls(**{name: side_by_side(name) for name in cls._fields[:-1]}, lag=torch.cat(lags))


@torch.no_grad()
def prepare_grid(net: ActorCritic, config: PPOConfig, grid: TensorGrid) -> tuple[TrainingBatch, Tensor]:
    """The training batch of a grid, and V(s_t) of its rows before the update."""
    shape = grid.reward.shape
    obs, next_obs = (net.normalize(part.flatten(0, 1).flatten(1).float()) for part in (grid.obs, grid.next_obs))
    action, behaviour = grid.action.flatten(0, 1), grid.log_prob.flatten()
    value = net.value(obs)
    proximal = proximal_log_prob(behaviour, net.log_prob(net.actor(obs), action), grid.lag.expand(shape).flatten())
    weight = importance_weight(proximal, behaviour, _max_weight(config))
    # Within an episode V(s_{t+1}) is the value of the next row; at its end, and at that of the segment, V(next_obs).
    is_boundary = grid.ended.clone()
    is_boundary[-1] = True
    value_grid = value.view(shape)
    next_value = torch.where(is_boundary, net.value(next_obs).view(shape), value_grid.roll(-1, dims=0))
    steps = (grid.reward, value_grid, next_value, grid.terminated, grid.ended)
    advantage, correction = _advantage_and_correction(config, *steps, weight.view(shape))
    # Value target: V(s_t) + correction_t
    return TrainingBatch(obs, action, proximal, weight, advantage.flatten(), correction.flatten() + value), value


@torch.no_grad()
def prepare_flat_batch(
    net: ActorCritic, config: PPOConfig, batch: FlatBatch, reward: Tensor, version: int
) -> tuple[TrainingBatch, Tensor]:
    """The training batch of a flat batch, and V(s_t) of its rows before the update.

    `reward` holds the rewards of the batch, scaled where that was asked for.
    """
    obs, action, behaviour = net.normalize(batch.obs), batch.action, batch.log_prob
    lag = version - batch.version
    value = net.value(obs)
    proximal = behaviour
    if lag.any():
        proximal = proximal_log_prob(behaviour, net.log_prob(net.actor(obs), action), lag)
    weight = importance_weight(proximal, behaviour, _max_weight(config))
    if not len(value):  # other learners have all rows of this update
        return TrainingBatch(obs, action, proximal, weight, value, value), value
    rows, mask = batch.rows, batch.mask
    # Within an episode V(s_{t+1}) is the value of the next row; at its end, and at that of the segment, V(next_obs).
    next_value = torch.zeros_like(value)
    has_next_row = mask[:-1] & mask[1:]
    next_value[rows[:-1][has_next_row]] = value[rows[1:][has_next_row]]
    next_value[batch.boundary] = net.value(net.normalize(batch.boundary_next_obs))
    terminated, ended = batch.terminated[rows], batch.ended[rows] | ~mask
    ended[:-1] |= ~mask[1:]  # a segment may end before its episode: nothing flows back from beyond it
    steps = (reward[rows], value[rows], next_value[rows], terminated, ended)
    advantage, correction = _advantage_and_correction(config, *steps, weight[rows])
    # From [T, B] back to flat rows, without the padding.
    flat = torch.empty((2, *value.shape), dtype=value.dtype, device=value.device)
    flat[:, rows[mask]] = torch.stack([advantage[mask], correction[mask]])
    return TrainingBatch(obs, action, proximal, weight, flat[0], flat[1] + value), value


def proximal_log_prob(behaviour: Tensor, recomputed: Tensor, lag: Tensor) -> Tensor:
    """Log-probabilities under the proximal policy (Hilton et al. 2022): the weights at the start of the update.

    For a step without lag that is the policy which acted, so its own number is used. Then nothing differs from plain
    PPO, to the last bit.
    """
    return torch.where(lag == 0, behaviour, recomputed)


def importance_weight(proximal: Tensor, behaviour: Tensor, max_weight: float) -> Tensor:
    """min(pi_proximal / pi_behaviour, max_weight); exactly 1 at lag 0."""
    return (proximal - behaviour).exp().clamp(max=max_weight)


def _max_weight(config: PPOConfig) -> float:
    """V-trace truncates importance weights at 1 (rho-bar, Espeholt et al. 2018)."""
    return 1.0 if config.lag_correction == "vtrace" else config.max_importance_weight


def _advantage_and_correction(
    config: PPOConfig,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantages, and what to add to V(s_t) for its target; all [T, B]."""
    steps = (reward, value, next_value, terminated, ended)
    if config.lag_correction == "vtrace":
        return vtrace(*steps, weight, config.gamma, config.gae_lambda)
    advantage = gae(*steps, config.gamma, config.gae_lambda)
    return advantage, advantage
