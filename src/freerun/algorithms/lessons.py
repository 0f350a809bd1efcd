"""What an update of PPO learns from: steps, and how much better they were than expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from freerun.algorithms.batch import Batch
from freerun.algorithms.networks import ActorCritic
from freerun.algorithms.returns import gae, importance_weight, proximal_log_prob, vtrace
from freerun.core import TensorSegment


class Lesson(NamedTuple):
    """By row; all of it stays as it is while the networks change."""

    obs: Tensor
    action: Tensor
    proximal: Tensor
    weight: Tensor
    advantage: Tensor
    target: Tensor


class LessonConfig(Protocol):
    @property
    def gamma(self) -> float: ...
    @property
    def gae_lambda(self) -> float: ...
    @property
    def lag_correction(self) -> str: ...
    @property
    def max_importance_weight(self) -> float: ...


class Grid(NamedTuple):
    """Segments of tensor environments side by side, [T, B, ...]: there are no gaps, so no host needs to look at it."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    ended: Tensor
    next_obs: Tensor
    lag: Tensor
    """[B]."""

    @classmethod
    def of(cls, segments: Sequence[TensorSegment], device: torch.device, version: int) -> Grid:
        def beside(name: str) -> Tensor:
            parts = [getattr(segment, name) for segment in segments]
            return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(device)

        lags = [
            torch.full((segment.reward.shape[1],), version - segment.version, device=device) for segment in segments
        ]
        return cls(**{name: beside(name) for name in cls._fields[:-1]}, lag=torch.cat(lags))


@torch.no_grad()
def lesson_of_grid(net: ActorCritic, config: LessonConfig, grid: Grid) -> tuple[Lesson, Tensor]:
    """And the values before the update."""
    shape = grid.reward.shape
    obs, next_obs = (net.normalize(part.flatten(0, 1).flatten(1).float()) for part in (grid.obs, grid.next_obs))
    action, behaviour = grid.action.flatten(0, 1), grid.log_prob.flatten()
    value = net.value(obs)
    proximal = proximal_log_prob(behaviour, net.log_prob(net.actor(obs), action), grid.lag.expand(shape).flatten())
    weight = importance_weight(proximal, behaviour, _limit(config))
    at_boundary = grid.ended.clone()
    at_boundary[-1] = True
    columns = value.view(shape)
    next_value = torch.where(at_boundary, net.value(next_obs).view(shape), columns.roll(-1, dims=0))
    steps = (grid.reward, columns, next_value, grid.terminated, grid.ended)
    advantage, correction = _advantage(config, *steps, weight.view(shape))
    return Lesson(obs, action, proximal, weight, advantage.flatten(), correction.flatten() + value), value


@torch.no_grad()
def lesson_of_batch(
    net: ActorCritic, config: LessonConfig, batch: Batch, reward: Tensor, version: int
) -> tuple[Lesson, Tensor]:
    """And the values before the update. `reward` is the batch's, scaled."""
    obs, action, behaviour = net.normalize(batch.obs), batch.action, batch.log_prob
    lag = version - batch.version
    value = net.value(obs)
    proximal = behaviour
    if lag.any():
        proximal = proximal_log_prob(behaviour, net.log_prob(net.actor(obs), action), lag)
    weight = importance_weight(proximal, behaviour, _limit(config))
    if not len(value):
        return Lesson(obs, action, proximal, weight, value, value), value
    rows, mask = batch.rows, batch.mask
    next_value = torch.zeros_like(value)
    inner = mask[:-1] & mask[1:]
    next_value[rows[:-1][inner]] = value[rows[1:][inner]]
    next_value[batch.boundary] = net.value(net.normalize(batch.boundary_next_obs))
    terminated, ended = batch.terminated[rows], batch.ended[rows] | ~mask
    ended[:-1] |= ~mask[1:]  # a segment may end before its episode: nothing flows back from beyond
    steps = (reward[rows], value[rows], next_value[rows], terminated, ended)
    advantage, correction = _advantage(config, *steps, weight[rows])
    flat = torch.empty((2, *value.shape), dtype=value.dtype, device=value.device)
    flat[:, rows[mask]] = torch.stack([advantage[mask], correction[mask]])
    return Lesson(obs, action, proximal, weight, flat[0], flat[1] + value), value


def _limit(config: LessonConfig) -> float:
    return 1.0 if config.lag_correction == "vtrace" else config.max_importance_weight


def _advantage(
    config: LessonConfig,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Worked out over time, [T, B]: advantages, and what to add to the values for their targets."""
    steps = (reward, value, next_value, terminated, ended)
    if config.lag_correction == "vtrace":
        return vtrace(*steps, weight, config.gamma, config.gae_lambda)
    advantage = gae(*steps, config.gamma, config.gae_lambda)
    return advantage, advantage
