"""Segments of any length joined into one flat batch, with the map back to time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freerun.core import Array, FloatArray, Segment


@dataclass(frozen=True)
class Batch:
    """N steps in flat arrays. `rows[t, b]` is the flat row of step t in column b, if `mask[t, b]`."""

    obs: Array
    action: Array
    log_prob: FloatArray
    reward: FloatArray
    terminated: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    version: NDArray[np.int64]
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_]
    boundary: NDArray[np.int64]
    """Flat rows whose successor is no row of the batch: an episode ended, or a segment did."""
    boundary_next_obs: Array

    def __len__(self) -> int:
        return len(self.reward)


def join(segments: Sequence[Segment]) -> Batch:
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
        at_boundary[-1] = True
        boundaries.append(here[at_boundary])
        boundary_next_obs.append(segment.next_obs[at_boundary])
        row, column = row + steps * width, column + width

    def flat(name: str) -> Array:
        arrays = [getattr(segment, name) for segment in segments]
        return np.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays])

    return Batch(
        obs=flat("obs"),
        action=flat("action"),
        log_prob=flat("log_prob"),
        reward=flat("reward"),
        terminated=flat("terminated"),
        ended=flat("ended"),
        version=flat("version"),
        rows=rows,
        mask=mask,
        boundary=np.concatenate(boundaries),
        boundary_next_obs=np.concatenate(boundary_next_obs),
    )
