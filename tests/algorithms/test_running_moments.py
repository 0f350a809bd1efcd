from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freerun.algorithms.policies.running_moments import RunningMoments


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), min_size=1, max_size=6))
def test_batches_merge_to_the_moments_of_all_rows(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    rows = np.concatenate([np.array(batch) for batch in batches])
    np.testing.assert_allclose(moments.mean, rows.mean(), atol=1e-6)
    np.testing.assert_allclose(moments.variance, rows.var(), atol=1e-4)
    assert moments.count == len(rows)
