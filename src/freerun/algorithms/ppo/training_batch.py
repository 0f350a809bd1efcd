"""What minibatches are drawn from: the steps of an update with their advantages and value targets.

Segments come in two layouts, and each becomes the same `TrainingBatch`. A `FlatBatch` holds segments of any length, as
flat rows with a map back to time. A `TensorGrid` holds the segments of tensor environments as they are, [T, B, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.returns import gae, vtrace
from freerun.core import AnySegment, Array, EnvSpec, Segment, TensorSegment

LARGE_ROW = 4096
"""Observations of at least this many numbers are taken for images."""
ROWS_OF_IMAGES = 1024
"""Images that go through a network together where no gradient is wanted."""


class Forward(Protocol):
    """Computes the outputs of an `ActorCritic` where no gradient is wanted: the module itself, or a faster way."""

    def head(self, normalized_obs: Tensor) -> Tensor: ...

    def value(self, normalized_obs: Tensor) -> Tensor: ...

    def head_and_value(self, normalized_obs: Tensor) -> tuple[Tensor, Tensor]: ...


class TrainingBatch(NamedTuple):
    """N rows that stay as they are while the networks change."""

    obs: Tensor
    """[N, observation], normalised. Images are bytes here, which the network scales."""
    action: Tensor
    proximal_log_prob: Tensor
    """Under the weights at the start of the update."""
    importance_weight: Tensor
    """pi_proximal / pi_behaviour, truncated; exactly 1 without lag."""
    advantage: Tensor
    value_target: Tensor
    value: Tensor
    """V(s_t) with the weights at the start of the update."""

    def select(self, rows: Tensor) -> TrainingBatch:
        """A minibatch."""
        # index_select takes half the time of column[rows] on a CPU, which counts where rows are images.
        return TrainingBatch(*(column.index_select(0, rows) for column in self))


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


@dataclass(frozen=True)
class FlatBatch:
    """N steps as rows. The segments' columns (environments) stand side by side; shorter ones are padded."""

    obs: Tensor
    """[N, observation], each flat."""
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    ended: Tensor
    version: Tensor
    rows: Tensor
    """[T, B]: the row of step t in column b, where `mask[t, b]`; elsewhere it is padding."""
    mask: Tensor
    boundary: Tensor
    """The rows whose successor is no row of the batch, because their episode or their segment ended."""
    boundary_next_obs: Tensor
    """The observations that follow those rows."""

    def __len__(self) -> int:
        return len(self.reward)


# ---------------------------------------------------------------------------------------------- joining segments


def empty_segment(env: EnvSpec) -> Segment:
    """A segment without steps, for a learner whose fellow learners have collected all that an update needs."""
    obs = np.zeros((0, 1, *env.observation_space.shape), env.observation_space.dtype)
    action = np.zeros((0, 1, *env.action_shape), env.action_space.dtype)
    number, flag, none = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.bool_), np.zeros((0, 1), np.float32)
    return Segment(obs, action, none, none, flag, flag, obs, number, number, seconds=0.0)


def flatten_segments(segments: Sequence[AnySegment], device: torch.device, keeps_bytes: bool = False) -> FlatBatch:
    """Join segments, which are all arrays or all tensors.

    With `keeps_bytes`, arrays of bytes stay so: images take a quarter of the memory until a network sees them."""
    tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
    if tensors:
        return _flatten_tensors(tensors, device)
    return _flatten_arrays([segment for segment in segments if isinstance(segment, Segment)], device, keeps_bytes)


def _flatten_arrays(segments: Sequence[Segment], device: torch.device, keeps_bytes: bool) -> FlatBatch:
    num_columns = sum(segment.reward.shape[1] for segment in segments)
    rows = np.zeros((max(len(segment.reward) for segment in segments), num_columns), np.int64)
    mask = np.zeros(rows.shape, np.bool_)
    boundaries, boundary_next_obs = [], []
    row = column = 0
    for segment in segments:
        num_steps, width = segment.reward.shape
        segment_rows = np.arange(row, row + num_steps * width).reshape(num_steps, width)
        rows[:num_steps, column : column + width] = segment_rows
        mask[:num_steps, column : column + width] = True
        is_boundary = segment.ended.copy()
        # A slice, because a segment may have no steps (`empty_segment`).
        is_boundary[-1:] = True
        # Only these rows need their next observation: elsewhere it is the observation of the next row.
        boundaries.append(segment_rows[is_boundary])
        boundary_next_obs.append(segment.next_obs[is_boundary])
        row, column = row + num_steps * width, column + width

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    def tensor_of_obs(rows: Tensor) -> Tensor:
        rows = rows.flatten(1)
        return rows if keeps_bytes and rows.dtype == torch.uint8 else rows.float()

    def flat(name: str) -> Tensor:
        arrays = [getattr(segment, name) for segment in segments]
        return tensor(np.concatenate([array.reshape(math.prod(array.shape[:2]), *array.shape[2:]) for array in arrays]))

    return FlatBatch(
        obs=tensor_of_obs(flat("obs")),
        action=flat("action"),
        log_prob=flat("log_prob"),
        reward=flat("reward"),
        terminated=flat("terminated"),
        ended=flat("ended"),
        version=flat("version"),
        rows=tensor(rows),
        mask=tensor(mask),
        boundary=tensor(np.concatenate(boundaries)),
        boundary_next_obs=tensor_of_obs(tensor(np.concatenate(boundary_next_obs))),
    )


def _flatten_tensors(segments: Sequence[TensorSegment], device: torch.device) -> FlatBatch:
    """Tensor segments have one length, so nothing is padded."""

    def side_by_side(name: str) -> Tensor:
        return torch.cat([getattr(segment, name) for segment in segments], dim=1).to(device)

    reward, ended = side_by_side("reward"), side_by_side("ended")
    rows = torch.arange(reward.numel(), device=device).view(reward.shape)
    is_boundary = ended.clone()
    is_boundary[-1] = True
    version = torch.tensor([segment.version for segment in segments], device=device)
    widths = torch.tensor([segment.reward.shape[1] for segment in segments], device=device)
    return FlatBatch(
        obs=side_by_side("obs").flatten(0, 1).flatten(1).float(),
        action=side_by_side("action").flatten(0, 1),
        log_prob=side_by_side("log_prob").flatten(),
        reward=reward.flatten(),
        terminated=side_by_side("terminated").flatten(),
        ended=ended.flatten(),
        version=version.repeat_interleave(widths).expand(reward.shape).flatten(),
        rows=rows,
        mask=torch.ones_like(ended),
        boundary=rows[is_boundary],
        boundary_next_obs=side_by_side("next_obs")[is_boundary].flatten(1).float(),
    )


# ---------------------------------------------------------------------------------------------- advantages and targets


@torch.no_grad()
def prepare_grid(net: ActorCritic, config: PPOConfig, grid: TensorGrid) -> TrainingBatch:
    """The training batch of a grid."""
    shape = grid.reward.shape
    obs, next_obs = (net.normalize(part.flatten(0, 1).flatten(1).float()) for part in (grid.obs, grid.next_obs))
    action, behaviour = grid.action.flatten(0, 1), grid.log_prob.flatten()
    value = net.value(obs)
    proximal = proximal_log_prob(behaviour, net.log_prob(net.head(obs), action), grid.lag.expand(shape).flatten())
    weight = importance_weight(proximal, behaviour, _max_weight(config))
    # Within an episode V(s_{t+1}) is the value of the next row; at its end, and at that of the segment, V(next_obs).
    is_boundary = grid.ended.clone()
    is_boundary[-1] = True
    value_grid = value.view(shape)
    next_value = torch.where(is_boundary, net.value(next_obs).view(shape), value_grid.roll(-1, dims=0))
    steps = (grid.reward, value_grid, next_value, grid.terminated, grid.ended)
    advantage, correction = _advantage_and_correction(config, *steps, weight.view(shape))
    # Value target: V(s_t) + correction_t
    return TrainingBatch(obs, action, proximal, weight, advantage.flatten(), correction.flatten() + value, value)


@torch.no_grad()
def prepare_flat_batch(
    net: ActorCritic,
    config: PPOConfig,
    batch: FlatBatch,
    reward: Tensor,
    version: int,
    remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    forward: Forward | None = None,
) -> TrainingBatch:
    """The training batch of a flat batch. `reward` holds its rewards, scaled where that was asked for.

    Of a network with a memory, `remember` turns the observations of rows and boundaries into what its heads see."""
    obs, action, behaviour = net.normalize(batch.obs), batch.action, batch.log_prob
    next_obs = net.normalize(batch.boundary_next_obs)
    seen, next_seen = (obs, next_obs) if remember is None else remember(obs, next_obs)
    lag = version - batch.version
    networks = forward or net

    def values(rows: Tensor) -> tuple[Tensor]:
        return (networks.value(rows),)

    proximal = behaviour
    # This waits for the device, but spares a pass through the actor in all modes without lag.
    if lag.any():
        head, value = _in_parts(networks.head_and_value, seen)
        proximal = proximal_log_prob(behaviour, net.log_prob(head, action), lag)
    else:
        (value,) = _in_parts(values, seen)
    weight = importance_weight(proximal, behaviour, _max_weight(config))
    if not len(value):  # other learners have all rows of this update
        return TrainingBatch(obs, action, proximal, weight, value, value, value)
    rows, mask = batch.rows, batch.mask
    # Within an episode V(s_{t+1}) is the value of the next row; at its end, and at that of the segment, V(next_obs).
    next_value = torch.zeros_like(value)
    has_next_row = mask[:-1] & mask[1:]
    next_value[rows[:-1][has_next_row]] = value[rows[1:][has_next_row]]
    (next_value[batch.boundary],) = _in_parts(values, next_seen)
    # Padding stands for row 0. Its numbers are computed with, but `ended` keeps them apart and `mask` drops them.
    terminated, ended = batch.terminated[rows], batch.ended[rows] | ~mask
    ended[:-1] |= ~mask[1:]  # a segment may end before its episode: nothing flows back from beyond it
    steps = (reward[rows], value[rows], next_value[rows], terminated, ended, weight[rows])
    # On the host, because a GPU would start several kernels for each of T steps one after another.
    results = _advantage_and_correction(config, *(part.cpu() for part in steps))
    # From [T, B] back to flat rows, without the padding.
    flat = torch.empty((2, *value.shape), dtype=value.dtype, device=value.device)
    flat[:, rows[mask]] = torch.stack(results).to(value.device)[:, mask]
    return TrainingBatch(obs, action, proximal, weight, flat[0], flat[1] + value, value)


def _in_parts(compute: Callable[[Tensor], tuple[Tensor, ...]], obs: Tensor) -> tuple[Tensor, ...]:
    """Apply a network to all rows. Images go through it in parts: what its layers compute takes ten times their memory.

    MLPs take all rows at once, which is faster."""
    if obs.shape[1] < LARGE_ROW or len(obs) <= ROWS_OF_IMAGES:
        return compute(obs)
    parts = [compute(part) for part in torch.split(obs, ROWS_OF_IMAGES)]
    return tuple(torch.cat(of_one) for of_one in zip(*parts, strict=True))


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
