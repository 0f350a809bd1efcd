"""Numbers that are not finite, found where they appear: a segment that holds one is never handed over."""

from __future__ import annotations

import numpy as np

from freerun.core import Array, RunSeed, Segment, UserError, episode_seed


class NotFinite(UserError):
    """Says in which step of which episode; the steps up to there are the evidence."""

    episode: int | None = None
    seed: int | None = None
    step: int | None = None
    evidence: Segment | None = None


def check_finite(segment: Segment, run_seed: RunSeed) -> None:
    """Raise NotFinite for the first number of a segment that is NaN or infinite, in the order in which they arose."""
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
    raise _failure(segment, run_seed, row, column, what, offset)


def _failure(segment: Segment, run_seed: RunSeed, row: int, column: int, what: str, offset: int) -> NotFinite:
    number = int(segment.episode[row, column])
    since = int(np.argmax(segment.episode[:, column] == number))
    step, seed = row - since + offset, episode_seed(run_seed, number)
    failure = NotFinite(
        f"{what} that is not finite at step {step} of episode {number} (seed {seed}): mend it, or look for the cause "
        "with `freerun check-env`"
    )
    failure.episode, failure.seed, failure.step = number, seed, step
    failure.evidence = part(segment, since, row + 1, column)
    return failure


def part(segment: Segment, start: int, stop: int, column: int) -> Segment:
    """Some steps of one lane, in arrays of their own."""
    rows, lane = slice(start, stop), slice(column, column + 1)
    return Segment(
        obs=segment.obs[rows, lane].copy(),
        action=segment.action[rows, lane].copy(),
        log_prob=segment.log_prob[rows, lane].copy(),
        reward=segment.reward[rows, lane].copy(),
        terminated=segment.terminated[rows, lane].copy(),
        truncated=segment.truncated[rows, lane].copy(),
        next_obs=segment.next_obs[rows, lane].copy(),
        version=segment.version[rows, lane].copy(),
        episode=segment.episode[rows, lane].copy(),
        seconds=segment.seconds,
    )


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _first_bad(array: Array) -> list[tuple[int, int]]:
    if _is_finite(array):
        return []
    finite = np.isfinite(array.reshape(*array.shape[:2], -1)).all(axis=2)
    row, column = np.argwhere(~finite)[0].tolist()
    return [(row, column)]
