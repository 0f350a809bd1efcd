"""The memory that a rollout records into: one row per step, one column per environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from freerun.core import Array, EnvSpec, FloatArray, Policy, RunSeed, Segment, episode_rng

Number = TypeVar("Number", bound=np.generic)

FIRST_CAPACITY = 128
"""Rows of a new buffer. A buffer doubles when its running episodes need more."""
NOISE_ROWS = 64
"""Noise is drawn for this many steps in one call, because a call of the generator costs more than a number."""


class RunningEpisode:
    """An episode while it runs: its number, its column in the buffer and its own random generator."""

    def __init__(self, number: int, column: int, run_seed: RunSeed, first_row: int, row: int):
        self.number = number
        self.column = column
        self.rng = episode_rng(run_seed, number)
        self.first_row = first_row  # the buffer keeps this row and all later ones until the episode has ended
        # How many steps the episode had made at row 0 of the current segment; negative if it began at a later row.
        self.num_steps_before = -row
        self.started_at = time.perf_counter()


class RolloutBuffer:
    """Steps of all environments of a rollout, in arrays that stay in place from step to step.

    `Rollout` writes observations, actions and heads straight into the arrays. The log-probabilities follow later, for
    many rows in one call of the policy, because one call per step would take as long as a cheap environment.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, policy: Policy):
        obs, action = spec.observation_space, spec.action_space
        self._num_envs = num_envs
        self._policy = policy
        self.row = 0
        """The row that the next step writes."""
        self.version = 0
        """The version of the weights that choose the next action."""
        self._num_rows_with_log_prob = 0
        # One row more than the others: row t + 1 holds the observation that step t led to.
        self.obs = np.zeros((FIRST_CAPACITY + 1, num_envs, *obs.shape), obs.dtype)
        self.action = np.zeros((FIRST_CAPACITY, num_envs, *spec.action_shape), action.dtype)
        self.head = np.zeros((FIRST_CAPACITY, num_envs, policy.head_size), np.float32)
        self._reward = np.zeros((FIRST_CAPACITY, num_envs), np.float32)
        self._log_prob = np.zeros((FIRST_CAPACITY, num_envs), np.float32)
        self._version_of_row = np.zeros((FIRST_CAPACITY, 1), np.int64)
        noise_shape = policy.draw(np.random.default_rng(0), 1).shape[1:]
        self._noise: FloatArray = np.zeros((NOISE_ROWS, num_envs, *noise_shape), np.float32)
        self._noise_row = NOISE_ROWS  # all used up: the first step draws

    @property
    def capacity(self) -> int:
        """The number of steps of each environment that it has memory for."""
        return len(self.action)

    def begin(self, episode: RunningEpisode, first_obs: Array) -> None:
        """Record the first observation of an episode, and replace the noise that its column has left from another."""
        self.obs[self.row, episode.column] = first_obs
        if self._noise_row < NOISE_ROWS:
            num_rows = NOISE_ROWS - self._noise_row
            self._noise[self._noise_row :, episode.column] = self._policy.draw(episode.rng, num_rows)

    def next_noise(self, episodes: Sequence[RunningEpisode]) -> FloatArray:
        """The noise for the next action of every environment, [B, ...].

        Each column is drawn from its episode's own generator, so an episode's actions do not depend on its neighbours.
        They do not depend on where the blocks of noise begin either: one long draw equals two short ones.
        """
        if self._noise_row == NOISE_ROWS:
            for episode in episodes:
                self._noise[:, episode.column] = self._policy.draw(episode.rng, NOISE_ROWS)
            self._noise_row = 0
        self._noise_row += 1
        row: FloatArray = self._noise[self._noise_row - 1]
        return row

    def complete_row(self, reward: Array, next_obs: Array, episodes: Sequence[RunningEpisode]) -> None:
        """Add what the environments returned to the row whose actions and heads are already written."""
        self._reward[self.row] = reward
        self._version_of_row[self.row] = self.version
        self.row += 1
        self.obs[self.row] = next_obs
        if self.row == len(self.action):
            self._make_space(episodes)

    def rewind(self) -> None:
        """Continue at row 0, from the newest observations."""
        self.obs[0] = self.obs[self.row]
        self.row = self._num_rows_with_log_prob = 0

    def compute_log_probs(self) -> None:
        """Fill in the log-probabilities of the rows that lack them.

        This must happen before a segment leaves, and before the policy loads other weights than those that acted.
        """
        rows = slice(self._num_rows_with_log_prob, self.row)
        if rows.start < rows.stop:
            head, action = self.head[rows], self.action[rows]
            flat = self._policy.log_prob(head.reshape(-1, head.shape[2]), action.reshape(-1, *action.shape[2:]))
            self._log_prob[rows] = flat.reshape(-1, self._num_envs)
            self._num_rows_with_log_prob = self.row

    def episode(self, episode: RunningEpisode) -> Segment:
        """All steps of one episode as a segment [T, 1], in views that later rows overwrite."""
        first_row, column = episode.first_row, slice(episode.column, episode.column + 1)
        num_steps = self.row - first_row
        ends = np.zeros((2, num_steps, 1), np.bool_)
        numbers = np.full((num_steps, 1), episode.number)
        return self._segment(first_row, column, numbers, ends, self.obs[first_row + 1 : self.row + 1, column])

    def segment(
        self,
        numbers: NDArray[np.int64],
        ends: NDArray[np.bool_],
        final_obs: Sequence[tuple[int, int, Array]],
    ) -> Segment:
        """All rows of all environments as a segment [T, B].

        `final_obs` lists (row, column, observation) of the episodes that ended on the way. The buffer itself holds the
        first observation of the following episode in those places.
        """
        next_obs = self.obs[1 : self.row + 1].copy()
        for row, column, obs in final_obs:
            next_obs[row, column] = obs
        return self._segment(0, slice(None), numbers, ends, next_obs)

    def _segment(
        self, first_row: int, columns: slice, numbers: NDArray[np.int64], ends: NDArray[np.bool_], next_obs: Array
    ) -> Segment:
        self.compute_log_probs()
        rows = slice(first_row, self.row)
        return Segment(
            obs=self.obs[rows, columns],
            action=self.action[rows, columns],
            log_prob=self._log_prob[rows, columns],
            reward=self._reward[rows, columns],
            terminated=ends[0],
            truncated=ends[1],
            next_obs=next_obs,
            version=np.broadcast_to(self._version_of_row[rows], numbers.shape),
            episode=numbers,
            seconds=0.0,
        )

    def _make_space(self, episodes: Sequence[RunningEpisode]) -> None:
        """Drop the rows that no running episode needs. Double the capacity if that leaves less than half of it free."""
        oldest = min(episode.first_row for episode in episodes)
        capacity = self.capacity * (2 if oldest < self.capacity // 2 else 1)
        self.obs = _moved(self.obs, oldest, capacity + 1)
        self.action = _moved(self.action, oldest, capacity)
        self.head = _moved(self.head, oldest, capacity)
        self._reward = _moved(self._reward, oldest, capacity)
        self._log_prob = _moved(self._log_prob, oldest, capacity)
        self._version_of_row = _moved(self._version_of_row, oldest, capacity)
        self.row -= oldest
        self._num_rows_with_log_prob = max(0, self._num_rows_with_log_prob - oldest)
        for episode in episodes:
            episode.first_row -= oldest


def _moved(array: NDArray[Number], first_row: int, num_rows: int) -> NDArray[Number]:
    """A new array of `num_rows` rows that begins with the rows of `array` from `first_row` on.

    It is always a new array, because segments that are still in use may be views of the old one."""
    moved = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    moved[: len(array) - first_row] = array[first_row:]
    return moved
