"""How stacks of frames lie in a slot: each frame once, although consecutive observations share most of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import Array

FIRST_STACK, NEWEST_FRAME, START_FRAME = "first_stack", "newest_frame", "start_frame"


def stack_shapes(num_steps: int, num_envs: int, space: spaces.Box) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The arrays that take the place of a segment's observations, which are stacks [frames, ...]."""
    here, frame, dtype = (num_steps, num_envs), space.shape[1:], np.dtype(space.dtype)
    return {
        FIRST_STACK: ((1, num_envs, *space.shape), dtype),  # the observation of the first step
        NEWEST_FRAME: ((*here, *frame), dtype),  # the last frame of the observation after each step
        START_FRAME: ((*here, *frame), dtype),  # the frame that an episode begins with; unused where none begins
    }


def write_stacks(arrays: Mapping[str, Array], obs: Array, next_obs: Array, ended: NDArray[np.bool_]) -> None:
    """Write the observations of some steps, [T, B, frames, ...] each."""
    num_steps = len(obs)
    arrays[FIRST_STACK][0] = obs[0]
    arrays[NEWEST_FRAME][:num_steps] = next_obs[:, :, -1]
    for row, column in _starts(ended):
        arrays[START_FRAME][row, column] = obs[row, column, -1]


def read_stacks(arrays: Mapping[str, Array], ended: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The observations before and after each step, as `write_stacks` got them.

    Those of a single environment within one episode are views of the same frames, which must not be written to."""
    first, newest = arrays[FIRST_STACK][0], arrays[NEWEST_FRAME][: len(ended)]
    num_steps, num_envs = ended.shape
    starts = _starts(ended)
    if num_envs == 1 and not starts:
        obs, next_obs = _windows(first[0], newest[:, 0])
        return obs[:, None], next_obs[:, None]
    obs = np.empty((num_steps, *first.shape), first.dtype)
    next_obs = np.empty_like(obs)
    for column in range(num_envs):
        rows = [0, *(row for row, of in starts if of == column), num_steps]
        stack = first[column]
        for begin, end in itertools.pairwise(rows):
            if begin:
                # An episode begins with a stack of its first frame.
                stack = np.broadcast_to(arrays[START_FRAME][begin, column], stack.shape)
            obs[begin:end, column], next_obs[begin:end, column] = _windows(stack, newest[begin:end, column])
    return obs, next_obs


def _starts(ended: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The steps, by row and column, that are the first of an episode. Those of row 0 are not looked for."""
    return [(row + 1, column) for row, column in zip(*np.nonzero(ended[:-1]), strict=True)]


def _windows(stack: Array, newest: Array) -> tuple[Array, Array]:
    """The stacks before and after each step of one episode, as views: frames t to t + k, and one later."""
    frames = np.concatenate([stack, newest])
    seen = np.lib.stride_tricks.sliding_window_view(frames, len(stack), axis=0)
    stacks = np.moveaxis(seen, -1, 1)  # [T + 1, frames, ...]
    return stacks[:-1], stacks[1:]
