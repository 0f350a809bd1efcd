"""NaN and infinity among tensors: one question to the device for a whole segment, and a search only if it says yes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freerun.core import NotFinite, Segment, TensorSegment

ORDER = {
    "obs": "the simulator returned an observation",
    "action": "the policy chose an action",
    "log_prob": "the policy gave a log-probability",
    "reward": "the simulator returned a reward",
    "next_obs": "the simulator returned an observation",
}
"""In which they arise within a step."""


def find_not_finite(segment: TensorSegment) -> NotFinite | None:
    """What to say of the first number that is NaN or infinite, if there is one."""
    floats = [name for name in ORDER if getattr(segment, name).is_floating_point()]
    finite = [torch.isfinite(getattr(segment, name)) for name in floats]
    if bool(torch.stack([array.all() for array in finite]).all()):
        return None
    # (row, order within the step, column)
    found = [(row, order, column) for order, array in enumerate(finite) for row, column in _first_bad(array)]
    row, order, column = min(found)
    name = floats[order]
    step = int(segment.episode_length[row, column]) - (name != "next_obs")
    failure = NotFinite(
        f"{ORDER[name]} that is not finite, at step {step} of an episode in environment {column} of "
        f"{segment.reward.shape[1]}"
    )
    failure.step = step
    failure.evidence = _evidence(segment, row, column)
    return failure


def _first_bad(finite: Tensor) -> list[tuple[int, int]]:
    bad = torch.nonzero(~finite.flatten(2).all(2) if finite.dim() > 2 else ~finite)
    return [(int(row), int(column)) for row, column in bad[:1]]


def _evidence(segment: TensorSegment, row: int, column: int) -> Segment:
    """The steps of the episode up to there, as far as this segment holds them."""
    ended = np.flatnonzero(segment.ended[:row, column].cpu().numpy())
    steps = slice(int(ended[-1]) + 1 if len(ended) else 0, row + 1)
    arrays = {
        name: getattr(segment, name)[steps, column : column + 1].cpu().numpy()
        for name in (*ORDER, "terminated", "truncated")
    }
    shape = arrays["reward"].shape
    return Segment(
        **arrays, version=np.full(shape, segment.version), episode=np.full(shape, column), seconds=segment.seconds
    )
