from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from freerun.algorithms.policies.running_moments import RunningMoments, needs_normalizing


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), min_size=1, max_size=6))
def test_batches_merge_to_the_moments_of_all_rows(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    rows = np.concatenate([np.array(batch) for batch in batches])
    np.testing.assert_allclose(moments.mean, rows.mean(), atol=1e-6)
    np.testing.assert_allclose(moments.variance, rows.var(), atol=1e-4)
    assert moments.count == len(rows)


def test_only_numbers_beyond_one_are_normalised() -> None:
    low, high = np.array([-1, 0, -np.inf, -1], np.float32), np.array([1, 1, 0, 2], np.float32)
    assert needs_normalizing(spaces.Box(low, high)).tolist() == [False, False, True, True]
    assert not needs_normalizing(spaces.Box(0, 255, (2, 2, 3), np.uint8)).any()
    assert not needs_normalizing(spaces.Box(-9, 9, (2, 2, 3))).any()
    assert needs_normalizing(spaces.Box(-9, 9, (2, 2))).shape == (4,)
