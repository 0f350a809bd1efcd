"""The check that no segment with a NaN or an infinity is handed over, and the report of where it arose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freerun.core import Array, NotFinite, RunSeed, Segment, episode_seed


def check_finite(segment: Segment, run_seed: RunSeed, num_steps_before: Sequence[int] | None = None) -> None:
    """Raise NotFinite if a segment holds a NaN or an infinity, for the one that arose first.

    `num_steps_before` says for each column how many steps its first episode had made before this segment."""
    # All observations but the first are in `next_obs`.
    arrays = (segment.obs[:1], segment.action, segment.log_prob, segment.reward, segment.next_obs)
    if all(_is_finite(array) for array in arrays):
        return
    # Sorted by row, then by the order in which the numbers of one step arise. The offset is 1 for observations that a
    # step leads to: they belong to the step after it.
    found = [
        (row, order, column, what, offset)
        for order, (what, array, offset) in enumerate(
            (
                ("the environment returned an observation", segment.obs[:1], 0),
                ("the policy chose an action", segment.action, 0),
                ("the policy gave a log-probability", segment.log_prob, 0),
                ("the environment returned a reward", segment.reward, 0),
                ("the environment returned an observation", segment.next_obs, 1),
            )
        )
        for row, column in _first_not_finite(array)
    ]
    row, _, column, what, offset = min(found)
    is_first_episode = segment.episode[0, column] == segment.episode[row, column]
    before = num_steps_before[column] if num_steps_before and is_first_episode else 0
    raise _failure(segment, run_seed, row, column, what, offset + before)


def _failure(segment: Segment, run_seed: RunSeed, row: int, column: int, what: str, offset: int) -> NotFinite:
    number = int(segment.episode[row, column])
    first_row = int(np.argmax(segment.episode[:, column] == number))
    step, seed = row - first_row + offset, episode_seed(run_seed, number)
    failure = NotFinite(
        f"{what} that is not finite at step {step} of episode {number} (seed {seed}): fix it, or look for the cause "
        "with `freerun check-env`"
    )
    failure.episode, failure.seed, failure.step = number, seed, step
    failure.evidence = segment.part(first_row, row + 1, column)
    return failure


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _first_not_finite(array: Array) -> list[tuple[int, int]]:
    """Row and column of the first step with a number that is not finite; empty if there is none."""
    if _is_finite(array):
        return []
    finite = np.isfinite(array.reshape(*array.shape[:2], -1)).all(axis=2)
    row, column = np.argwhere(~finite)[0].tolist()
    return [(row, column)]
