"""Segments of different lengths, joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from freerun.algorithms.ppo.training_batch import flatten_segments
from freerun.core import Segment, TensorSegment

CPU = torch.device("cpu")


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
    batch = flatten_segments([segment(0, 2, 1, [(1, 0)]), segment(100, 3, 2, [(0, 1)])], CPU)
    assert len(batch) == 2 + 6
    assert batch.mask.tolist() == [[True, True, True], [True, True, True], [False, True, True]]
    padded = batch.obs[batch.rows, 0].where(batch.mask, torch.tensor(-1.0))
    assert padded.tolist() == [[0, 100, 101], [1, 102, 103], [-1, 104, 105]]


def test_boundaries_are_ends_of_episodes_and_of_segments() -> None:
    batch = flatten_segments([segment(0, 2, 1, [(1, 0)]), segment(100, 3, 2, [(0, 1)])], CPU)
    assert sorted(batch.obs[batch.boundary, 0].tolist()) == [1, 101, 104, 105]
    assert torch.equal(batch.boundary_next_obs, batch.obs[batch.boundary] + 1000)


def test_tensors_are_joined_as_arrays_are() -> None:
    arrays = [segment(0, 3, 2, [(1, 0)]), segment(100, 3, 1, [(0, 0), (2, 0)])]
    arrays[1].version[:] = 4
    expected, batch = flatten_segments(arrays, CPU), flatten_segments([as_tensors(one) for one in arrays], CPU)
    # Rows lie in another order, so each is compared where it belongs in time.
    for name in ("obs", "action", "log_prob", "reward", "terminated", "ended", "version"):
        assert torch.equal(getattr(batch, name)[batch.rows], getattr(expected, name)[expected.rows]), name
    assert torch.equal(batch.mask, expected.mask)
    successors = [
        dict(zip(one.obs[one.boundary, 0].tolist(), one.boundary_next_obs[:, 0].tolist(), strict=True))
        for one in (expected, batch)
    ]
    assert successors[0] == successors[1]


def as_tensors(one: Segment) -> TensorSegment:
    names = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs")
    tensors: dict[str, Any] = {name: torch.from_numpy(getattr(one, name)) for name in names}
    nothing = torch.zeros_like(tensors["reward"])
    version = int(one.version[0, 0])
    lengths = nothing.long()
    return TensorSegment(
        **tensors, episode_return=nothing, episode_length=lengths, version=version, seconds=0.0, worker=0
    )
