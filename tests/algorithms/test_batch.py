"""Segments of different lengths, joined."""

from __future__ import annotations

import numpy as np

from freerun.algorithms.batch import join
from freerun.core import Segment


def segment(first_obs: int, num_steps: int, width: int, ends: list[tuple[int, int]]) -> Segment:
    """Observations count up; `ends` are the (step, column) where an episode terminated."""
    obs = np.arange(first_obs, first_obs + num_steps * width, dtype=np.float32).reshape(num_steps, width, 1)
    terminated = np.zeros((num_steps, width), np.bool_)
    for step, column in ends:
        terminated[step, column] = True
    return Segment(
        obs=obs,
        action=np.zeros((num_steps, width), np.int64),
        log_prob=np.zeros((num_steps, width), np.float32),
        reward=obs[..., 0],
        terminated=terminated,
        truncated=np.zeros_like(terminated),
        next_obs=obs + 1000,
        version=np.zeros((num_steps, width), np.int64),
        episode=np.zeros((num_steps, width), np.int64),
        seconds=0.0,
    )


def test_rows_lead_back_to_time_and_column() -> None:
    batch = join([segment(0, 2, 1, [(1, 0)]), segment(100, 3, 2, [(0, 1)])])
    assert len(batch) == 2 + 6
    assert batch.mask.tolist() == [[True, True, True], [True, True, True], [False, True, True]]
    padded = np.where(batch.mask, batch.obs[batch.rows, 0], -1)
    assert padded.tolist() == [[0, 100, 101], [1, 102, 103], [-1, 104, 105]]


def test_boundaries_are_ends_of_episodes_and_of_segments() -> None:
    batch = join([segment(0, 2, 1, [(1, 0)]), segment(100, 3, 2, [(0, 1)])])
    assert sorted(batch.obs[batch.boundary, 0]) == [1, 101, 104, 105]
    np.testing.assert_array_equal(batch.boundary_next_obs, batch.obs[batch.boundary] + 1000)
