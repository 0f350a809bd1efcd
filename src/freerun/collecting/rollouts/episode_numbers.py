"""Who names the next episode of a rollout: rules that all rollouts share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, MutableSequence

NextEpisode = Callable[[bool], int | None]
"""Returns the number of an episode that may start now, or None. The argument is True when no environment is running:
the rollout then has nothing to do until it gets a number, and None ends it."""
RESETS_ITSELF = "this vector environment starts its episodes by itself, so that nobody can ask it for whole ones"


class NoNextEpisode(ValueError):
    """An environment of `segments` is free, and there is no episode left that it could play."""


def next_from(numbers: Iterable[int]) -> NextEpisode:
    """A `NextEpisode` that takes the numbers of an iterable, in their order."""
    iterator = iter(numbers)
    return lambda wait: next(iterator, None)


def worker_episode_numbers(
    last_begun: MutableSequence[int] | ctypes.Array[ctypes.c_longlong], worker: int, stride: int
) -> Iterator[int]:
    """Every `stride`-th number after `last_begun[worker]`, without end.

    Each number is written to `last_begun` before it is played, so that whoever finds a worker dead knows where its
    successor must go on."""
    while True:
        last_begun[worker] += stride
        yield last_begun[worker]


def resolve_num_steps(num_steps: int | Callable[[], int]) -> int:
    """The length of the next segment, which is either fixed or asked for before each segment."""
    return num_steps() if callable(num_steps) else num_steps
