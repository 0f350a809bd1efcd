"""Segments of any length as flat rows on the learner's device, with a map back to time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freerun.core import AnySegment, Array, EnvSpec, Segment, TensorSegment


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


def empty_segment(env: EnvSpec) -> Segment:
    """A segment without steps, for a learner whose fellow learners have collected all that an update needs."""
    obs = np.zeros((0, 1, *env.observation_space.shape), env.observation_space.dtype)
    action = np.zeros((0, 1, *env.action_shape), env.action_space.dtype)
    number, flag, none = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.bool_), np.zeros((0, 1), np.float32)
    return Segment(obs, action, none, none, flag, flag, obs, number, number, seconds=0.0)


def flatten_segments(segments: Sequence[AnySegment], device: torch.device) -> FlatBatch:
    """Join segments, which are all arrays or all tensors."""
    tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
    if tensors:
        return _flatten_tensors(tensors, device)
    return _flatten_arrays([segment for segment in segments if isinstance(segment, Segment)], device)


def _flatten_arrays(segments: Sequence[Segment], device: torch.device) -> FlatBatch:
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
        is_boundary[-1:] = True
        boundaries.append(segment_rows[is_boundary])
        boundary_next_obs.append(segment.next_obs[is_boundary])
        row, column = row + num_steps * width, column + width

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    def flat(name: str) -> Tensor:
        arrays = [getattr(segment, name) for segment in segments]
        return tensor(np.concatenate([array.reshape(math.prod(array.shape[:2]), *array.shape[2:]) for array in arrays]))

    return FlatBatch(
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
