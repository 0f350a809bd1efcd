"""Numbers that are not finite, found where they appear: a segment that holds one is never handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freerun.core import Array, NotFinite, RunSeed, Segment, episode_seed


def check_finite(segment: Segment, run_seed: RunSeed, steps_before: Sequence[int] | None = None) -> None:
    """Raise NotFinite for the first number of a segment that is NaN or infinite, in the order in which they arose.

    Where the segment begins within episodes, `steps_before` says how many steps each lane's had made."""
    arrays = (segment.obs[:1], segment.action, segment.log_prob, segment.reward, segment.next_obs)
    if all(_is_finite(array) for array in arrays):
        return
    # (row, order within the step, column, what it is, which step of the row's episode it counts as)
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
        for row, column in _first_bad(array)
    ]
    row, _, column, what, offset = min(found)
    before = steps_before[column] if steps_before and segment.episode[0, column] == segment.episode[row, column] else 0
    raise _failure(segment, run_seed, row, column, what, offset + before)


def _failure(segment: Segment, run_seed: RunSeed, row: int, column: int, what: str, offset: int) -> NotFinite:
    number = int(segment.episode[row, column])
    since = int(np.argmax(segment.episode[:, column] == number))
    step, seed = row - since + offset, episode_seed(run_seed, number)
    failure = NotFinite(
        f"{what} that is not finite at step {step} of episode {number} (seed {seed}): mend it, or look for the cause "
        "with `freerun check-env`"
    )
    failure.episode, failure.seed, failure.step = number, seed, step
    failure.evidence = segment.part(since, row + 1, column)
    return failure


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _first_bad(array: Array) -> list[tuple[int, int]]:
    if _is_finite(array):
        return []
    finite = np.isfinite(array.reshape(*array.shape[:2], -1)).all(axis=2)
    row, column = np.argwhere(~finite)[0].tolist()
    return [(row, column)]
