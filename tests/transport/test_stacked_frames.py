"""Stacks of frames cross a slot with each frame written once."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from freerun.collecting.workers.slot_workers import read_slot, write_slot
from freerun.core import EnvSpec, Segment
from freerun.transport import processes
from freerun.transport.slots import Slots, bytes_per_step

NUM_FRAMES = 3
STACKED = EnvSpec(spaces.Box(0, 255, (NUM_FRAMES, 2, 2), np.uint8), spaces.Discrete(2), num_frames=NUM_FRAMES)


def played(num_steps: int, ends_after: dict[int, list[int]]) -> Segment:
    """A segment as a rollout makes it, with a number per frame. `ends_after` has the steps that end an episode, by
    environment."""
    num_envs = len(ends_after)
    obs = np.zeros((num_steps, num_envs, NUM_FRAMES, 2, 2), np.uint8)
    next_obs, ended = np.zeros_like(obs), np.zeros((num_steps, num_envs), np.bool_)
    for column, ends in ends_after.items():
        frame = 100 * column
        # It begins in the middle of an episode.
        stack = [frame + 1, frame + 2, frame + 3]
        frame += 3
        for row in range(num_steps):
            obs[row, column] = np.array(stack)[:, None, None]
            frame += 1
            stack = [*stack[1:], frame]
            next_obs[row, column] = np.array(stack)[:, None, None]
            if row in ends:
                ended[row, column] = True
                frame += 1
                stack = [frame] * NUM_FRAMES
    number = np.zeros((num_steps, num_envs), np.int64)
    real = np.zeros((num_steps, num_envs), np.float32)
    return Segment(obs, number, real, real, ended, np.zeros_like(ended), next_obs, number, number, seconds=0.0)


@pytest.mark.parametrize(
    "ends_after",
    [{0: []}, {0: [5]}, {0: [0, 1, 4]}, {0: [], 1: []}, {0: [2], 1: [], 2: [0, 5]}],
    ids=["one episode", "ends", "several", "two environments", "three"],
)
def test_what_is_written_is_read(ends_after: dict[int, list[int]]) -> None:
    segment = played(6, ends_after)
    slots = Slots(processes.context(), 2, 8, len(ends_after), STACKED)
    for _ in range(2):  # also into memory that was used before
        assert write_slot(slots[0], 7, segment)
        read = read_slot(slots[0]).segment
        np.testing.assert_array_equal(read.obs, segment.obs)
        np.testing.assert_array_equal(read.next_obs, segment.next_obs)
        np.testing.assert_array_equal(read.terminated, segment.terminated)


def test_a_long_segment_is_read_part_by_part() -> None:
    segment = played(7, {0: [3]})
    slots = Slots(processes.context(), 1, 3, 1, STACKED)
    parts = []
    for start in (0, 3, 6):
        write_slot(slots[0], 0, segment, start)
        parts.append(read_slot(slots[0]).segment)
    np.testing.assert_array_equal(np.concatenate([part.obs for part in parts]), segment.obs)
    np.testing.assert_array_equal(np.concatenate([part.next_obs for part in parts]), segment.next_obs)


def test_an_episode_is_kept_once_in_the_learner_too() -> None:
    slots = Slots(processes.context(), 1, 8, 1, STACKED)
    write_slot(slots[0], 0, played(6, {0: []}))
    read = read_slot(slots[0]).segment
    assert np.shares_memory(read.obs, read.next_obs)
    write_slot(slots[0], 0, played(6, {0: [2]}))
    assert read.obs[0, 0, 0, 0, 0] == 1, "what was read does not change with the slot"


def test_a_step_takes_the_memory_of_two_frames() -> None:
    """2 * 4 bytes of frames (the newest, and room for the first of an episode), 8 + 8 + 8 for the action, version and
    episode, 4 + 4 for the reward and the log-probability, 1 + 1 for how it ended."""
    assert bytes_per_step(1, STACKED) == 2 * 4 + 3 * 8 + 2 * 4 + 2
    plain = EnvSpec(STACKED.observation_space, STACKED.action_space)
    assert bytes_per_step(1, plain) == 2 * 12 + 3 * 8 + 2 * 4 + 2
