"""One environment: what each of a hundred workers steps, with as little around it as possible.

It plays the same episodes as `Rollout`, bit for bit (the modes' contract tests compare the two). Where a hundred
processes share two cores their caches are cold at every step, and a Python or numpy call costs µs instead of tenths: so
nothing is looked up, sliced or wrapped here that could have been before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from freerun.collectors.finite import check_finite
from freerun.collectors.rollout import NextEpisode, number_of
from freerun.collectors.tape import FIRST_CAPACITY
from freerun.core import Array, EnvSpec, FloatArray, Policy, RunSeed, Segment, episode_rng, episode_seed
from freerun.transport.pulse import Vitals

NOISE_ROWS = 20
"""Drawn at once. What an episode leaves of them is wasted, and few stay in the nearest cache."""


class Solo:
    """`Rollout` for one environment. A segment's arrays are overwritten by the next one."""

    num_envs = 1

    def __init__(self, env: gymnasium.Env[Any, Any], spec: EnvSpec, policy: Policy, run_seed: RunSeed):
        self._env = env
        self._spec = spec
        self._policy = policy
        self._act = policy.single()
        self._run_seed = run_seed
        self._version = 0
        self.vitals = Vitals()
        self._number = -1
        self._noise_rows: list[FloatArray] = []
        self._last_obs: Array | None = None  # where the next segment begins
        self._allocate(FIRST_CAPACITY)

    def _allocate(self, num_steps: int) -> None:
        space = self._spec.observation_space
        self._obs: Array = np.zeros((num_steps + 1, *space.shape), space.dtype)
        self._head: FloatArray = np.zeros((num_steps, self._policy.head_size), np.float32)
        self._obs_rows, self._head_rows = list(self._obs), list(self._head)

    def load(self, weights: FloatArray, version: int) -> None:
        self._policy.load(weights)
        self._act = self._policy.single()
        self._version = version

    def episodes(self, next_episode: NextEpisode) -> Iterator[Segment]:
        """Whole episodes, until there is no next one."""
        while (number := next_episode(True)) is not None:
            self._begin(number, row=0)
            yield self._play(None)

    def segments(self, steps: int | Callable[[], int], next_episode: NextEpisode) -> Iterator[Segment]:
        """So many steps at a time, without end, from one episode to the next."""
        while True:
            num_steps, last_obs = number_of(steps), self._last_obs
            if num_steps != len(self._head_rows):
                self._allocate(num_steps)
            if last_obs is None:
                self._begin(next_episode(True), row=0)
            else:
                self._obs_rows[0][...] = last_obs
            segment = self._play(next_episode)
            self._last_obs = self._obs_rows[num_steps]
            self._num_before += num_steps
            yield segment

    def _begin(self, number: int | None, row: int) -> None:
        assert number is not None
        self._number = number
        self._num_before = -row  # steps of the episode, when the segment that holds it began
        self._rng = episode_rng(self._run_seed, number)
        self._noise_rows = []
        self.vitals.begin(number)
        self.vitals.beat()
        self._obs_rows[row][...], _ = self._env.reset(seed=episode_seed(self._run_seed, number))

    def _play(self, next_episode: NextEpisode | None) -> Segment:
        """Until the episode ends; or, given the next ones, until all rows are full."""
        started = time.perf_counter()
        act, step, obs_rows, head_rows = self._act, self._env.step, self._obs_rows, self._head_rows
        beat = self.vitals.beat
        noise_rows, num_before = self._noise_rows, self._num_before
        actions, rewards, numbers, ends = [], [], [self._number], []
        row = 0
        while True:
            if not noise_rows:
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
        segment.seconds = time.perf_counter() - started
        check_finite(segment, self._run_seed, (num_before,))
        return segment

    def _segment(
        self, action: Array, rewards: list[Any], numbers: list[int], ends: list[tuple[int, bool, bool, Array]]
    ) -> Segment:
        num_steps = len(rewards)
        next_obs = self._obs[1 : num_steps + 1]
        flags = np.zeros((2, num_steps, 1), np.bool_)
        episode = np.full((num_steps, 1), numbers[0])
        if len(numbers) > 1:  # an episode has begun on the way, where the last observation of another lay
            next_obs = next_obs.copy()
        for place, (row, terminated, truncated, last_obs) in enumerate(ends):
            flags[:, row - 1, 0] = terminated, truncated
            next_obs[row - 1] = last_obs
            episode[row:] = numbers[min(place + 1, len(numbers) - 1)]
        return Segment(
            obs=self._obs[:num_steps, None],
            action=action[:, None],
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
        obs, head = self._obs, self._head
        self._allocate(2 * len(head))
        self._obs[: len(obs)], self._head[: len(head)] = obs, head

    def close(self) -> None:
        self._env.close()
