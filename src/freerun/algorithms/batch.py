"""Segments of any length joined into one flat batch on the learner's device, with the map back to time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freerun.core import AnySegment, Array, EnvSpec, Segment, TensorSegment


@dataclass(frozen=True)
class Batch:
    """N steps, flat. `rows[t, b]` is the flat row of step t in column b, if `mask[t, b]`."""

    obs: Tensor
    """[N, observation], flat."""
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    ended: Tensor
    version: Tensor
    rows: Tensor
    mask: Tensor
    boundary: Tensor
    """Flat rows whose successor is no row of the batch: an episode ended, or a segment did."""
    boundary_next_obs: Tensor

    def __len__(self) -> int:
        return len(self.reward)


def nothing(env: EnvSpec) -> Segment:
    """A segment without a step: what a learner has whose peers have collected all that an update needs."""
    obs = np.zeros((0, 1, *env.observation_space.shape), env.observation_space.dtype)
    action = np.zeros((0, 1, *env.action_shape), env.action_space.dtype)
    number, flag, none = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.bool_), np.zeros((0, 1), np.float32)
    return Segment(obs, action, none, none, flag, flag, obs, number, number, seconds=0.0)


def join(segments: Sequence[AnySegment], device: torch.device) -> Batch:
    """All segments are of one kind: a collector hands over arrays, or tensors."""
    tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
    if tensors:
        return _join_tensors(tensors, device)
    return _join_arrays([segment for segment in segments if isinstance(segment, Segment)], device)


def _join_arrays(segments: Sequence[Segment], device: torch.device) -> Batch:
    num_columns = sum(segment.reward.shape[1] for segment in segments)
    rows = np.zeros((max(len(segment.reward) for segment in segments), num_columns), np.int64)
    mask = np.zeros(rows.shape, np.bool_)
    boundaries, boundary_next_obs = [], []
    row = column = 0
    for segment in segments:
        steps, width = segment.reward.shape
        here = np.arange(row, row + steps * width).reshape(steps, width)
        rows[:steps, column : column + width] = here
        mask[:steps, column : column + width] = True
        at_boundary = segment.ended.copy()
        at_boundary[-1:] = True
        boundaries.append(here[at_boundary])
        boundary_next_obs.append(segment.next_obs[at_boundary])
        row, column = row + steps * width, column + width

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    def flat(name: str) -> Tensor:
        arrays = [getattr(segment, name) for segment in segments]
        return tensor(np.concatenate([array.reshape(math.prod(array.shape[:2]), *array.shape[2:]) for array in arrays]))

    return Batch(
        obs=flat("obs").flatten(1).float(),
        action=flat("action"),
        log_prob=flat("log_prob"),
        reward=flat("reward"),
        terminated=flat("terminated"),
        ended=flat("ended"),
        version=flat("version"),
        rows=tensor(rows),
        mask=tensor(mask),
        boundary=tensor(np.concatenate(boundaries)),
        boundary_next_obs=tensor(np.concatenate(boundary_next_obs)).flatten(1).float(),
    )


def _join_tensors(segments: Sequence[TensorSegment], device: torch.device) -> Batch:
    """Segments of one length, side by side."""

    def beside(name: str) -> Tensor:
        return torch.cat([getattr(segment, name) for segment in segments], dim=1).to(device)

    reward, ended = beside("reward"), beside("ended")
    rows = torch.arange(reward.numel(), device=device).view(reward.shape)
    at_boundary = ended.clone()
    at_boundary[-1] = True
    version = torch.tensor([segment.version for segment in segments], device=device)
    widths = torch.tensor([segment.reward.shape[1] for segment in segments], device=device)
    return Batch(
        obs=beside("obs").flatten(0, 1).flatten(1).float(),
        action=beside("action").flatten(0, 1),
        log_prob=beside("log_prob").flatten(),
        reward=reward.flatten(),
        terminated=beside("terminated").flatten(),
        ended=ended.flatten(),
        version=version.repeat_interleave(widths).expand(reward.shape).flatten(),
        rows=rows,
        mask=torch.ones_like(ended),
        boundary=rows[at_boundary],
        boundary_next_obs=beside("next_obs")[at_boundary].flatten(1).float(),
    )
