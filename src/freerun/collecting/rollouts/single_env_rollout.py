"""A rollout of a single environment, with as little Python per step as possible.

It plays the same episodes as `Rollout`, bit for bit (the contract tests of the modes compare the two), and it shares
with it the rules for episode numbers, seeds, noise and finite numbers. It exists beside `Rollout` because this is what
each of a hundred worker processes runs. Where those share two cores, the caches are cold at every step, and a Python or
numpy call costs microseconds instead of tenths of one. So nothing is looked up, sliced or wrapped in the inner loop
that could have been prepared before: rows of the buffers are kept as lists of views, actions and rewards are collected
in plain lists, and the policy gives a function with all its arrays bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, SupportsFloat

import gymnasium
import numpy as np

from freerun.collecting.rollouts.episode_numbers import NextEpisode, NoNextEpisode, resolve_num_steps
from freerun.collecting.rollouts.finite_check import check_finite
from freerun.collecting.rollouts.rollout import FIRST_CAPACITY
from freerun.core import (
    Array,
    EnvSpec,
    FloatArray,
    Policy,
    RunSeed,
    Segment,
    as_memory_policy,
    empty_memory,
    episode_rng,
    episode_seed,
)
from freerun.transport.heartbeats import Heartbeat

NOISE_ROWS = 20
"""Noise is drawn for this many steps in one call. An episode wastes what it leaves over, and more rows would not stay
in the nearest cache."""


class SingleEnvRollout:
    """A `Rollout` of one environment. The next segment overwrites the arrays of the last one."""

    num_envs = 1

    def __init__(self, env: gymnasium.Env[Any, Any], spec: EnvSpec, policy: Policy, run_seed: RunSeed):
        self._env = env
        self._spec = spec
        self._policy = policy
        self._memory = empty_memory(policy, 1)
        self._act = self._bind_policy()
        self._run_seed = run_seed
        self._version = 0
        self.heartbeat = Heartbeat()
        """Counts resets and steps. Workers replace it by one that lies in shared memory."""
        self._number = -1
        self._noise_rows: list[FloatArray] = []  # the next row is the last of the list
        self._last_obs: Array | None = None  # where the next segment begins
        self._allocate(FIRST_CAPACITY)

    def _allocate(self, num_steps: int) -> None:
        space = self._spec.observation_space
        self._obs: Array = np.zeros((num_steps + 1, *space.shape), space.dtype)
        self._head: FloatArray = np.zeros((num_steps, self._policy.head_size), np.float32)
        # To index a list is several times cheaper than to slice an array.
        self._obs_rows, self._head_rows = list(self._obs), list(self._head)

    def load(self, weights: FloatArray, version: int) -> None:
        # No log-probabilities are missing here: `_play` computes those of a segment before it returns.
        self._policy.load(weights)
        self._act = self._bind_policy()
        self._version = version

    def _bind_policy(self) -> Callable[[Array, FloatArray, FloatArray], Any]:
        """Return the policy as a function of one observation, with the weights of now."""
        remembering = as_memory_policy(self._policy)
        if self._memory is None or remembering is None:
            return self._policy.single()
        return remembering.single_from(self._memory[0])

    def episodes(self, next_episode: NextEpisode) -> Iterator[Segment]:
        """Yield whole episodes, until there is no next one."""
        while (number := next_episode(True)) is not None:
            self._begin(number, row=0)
            yield self._play(None)

    def segments(self, num_steps: int | Callable[[], int], next_episode: NextEpisode) -> Iterator[Segment]:
        """Yield `num_steps` steps at a time, without end, from one episode to the next."""
        while True:
            num_rows, last_obs = resolve_num_steps(num_steps), self._last_obs
            if num_rows != len(self._head_rows):
                self._allocate(num_rows)
            if last_obs is None:
                self._begin(next_episode(True), row=0)
            else:
                self._obs_rows[0][...] = last_obs
            memory = None if self._memory is None else self._memory.copy()
            segment = self._play(next_episode)
            segment.memory = memory
            self._last_obs = self._obs_rows[num_rows]
            self._num_steps_before += num_rows
            yield segment

    def _begin(self, number: int | None, row: int) -> None:
        """Reset the environment with the seed of an episode; its first observation goes to `row`."""
        if number is None:
            raise NoNextEpisode("the environment has no episode to play")
        self._number = number
        # How many steps the episode had made at row 0 of the current segment; negative if it began at a later row.
        self._num_steps_before = -row
        self._rng = episode_rng(self._run_seed, number)
        self._noise_rows = []
        if self._memory is not None:
            self._memory[:] = 0
        # Before the reset, so that a reset that hangs or kills the process is blamed on this episode.
        self.heartbeat.begin_episode(number)
        self.heartbeat.beat()
        self._obs_rows[row][...], _ = self._env.reset(seed=episode_seed(self._run_seed, number))

    def _play(self, next_episode: NextEpisode | None) -> Segment:
        """Step until the episode ends; or, if there is a `next_episode` to go on with, until all rows are full."""
        started_at = time.perf_counter()
        # Local names: the loop below does not look up a single attribute of `self` unless an episode ends.
        act, step, obs_rows, head_rows = self._act, self._env.step, self._obs_rows, self._head_rows
        beat = self.heartbeat.beat
        noise_rows, num_steps_before = self._noise_rows, self._num_steps_before
        actions, rewards, numbers, ends = [], [], [self._number], []
        row = 0
        while True:
            if not noise_rows:
                # Reversed, so that `pop()` takes the rows in the order in which they were drawn.
                noise_rows.extend(self._policy.draw(self._rng, NOISE_ROWS)[::-1])
            action = act(obs_rows[row], noise_rows.pop(), head_rows[row])
            beat()
            obs, reward, terminated, truncated, _ = step(action)
            actions.append(action)
            rewards.append(reward)
            row += 1
            obs_rows[row][...] = obs
            if terminated or truncated:
                ends.append((row, terminated, truncated, obs_rows[row].copy()))
                if next_episode is None:
                    break
                self._begin(next_episode(True), row)
                noise_rows = self._noise_rows
                numbers.append(self._number)
            if row == len(head_rows):
                if next_episode is not None:
                    break
                self._grow()
                obs_rows, head_rows = self._obs_rows, self._head_rows
        segment = self._segment(np.array(actions, self._spec.action_space.dtype), rewards, numbers, ends)
        segment.seconds = time.perf_counter() - started_at
        check_finite(segment, self._run_seed, (num_steps_before,))
        return segment

    def _segment(
        self, action: Array, rewards: list[SupportsFloat], numbers: list[int], ends: list[tuple[int, bool, bool, Array]]
    ) -> Segment:
        """The played rows as a segment [T, 1].

        `numbers` are the episodes in it. `ends` has, for each that ended: the row after its last step, terminated,
        truncated, and its final observation."""
        num_steps = len(rewards)
        next_obs = self._obs[1 : num_steps + 1]
        flags = np.zeros((2, num_steps, 1), np.bool_)
        episode = np.full((num_steps, 1), numbers[0])
        if len(numbers) > 1:  # the first observation of an episode lies where the final one of another belongs
            next_obs = next_obs.copy()
        for place, (row, terminated, truncated, final_obs) in enumerate(ends):
            flags[:, row - 1, 0] = terminated, truncated
            next_obs[row - 1] = final_obs
            episode[row:] = numbers[min(place + 1, len(numbers) - 1)]
        return Segment(
            obs=self._obs[:num_steps, None],
            action=action[:, None],
            # Once for the whole segment: one call per step would take as long as a cheap environment.
            log_prob=self._policy.log_prob(self._head[:num_steps], action)[:, None],
            reward=np.array(rewards, np.float32)[:, None],
            terminated=flags[0],
            truncated=flags[1],
            next_obs=next_obs[:, None],
            version=np.full((num_steps, 1), self._version),
            episode=episode,
            seconds=0.0,
        )

    def _grow(self) -> None:
        """Double the buffers, for an episode that is longer than all before."""
        obs, head = self._obs, self._head
        self._allocate(2 * len(head))
        self._obs[: len(obs)], self._head[: len(head)] = obs, head

    def close(self) -> None:
        self._env.close()
