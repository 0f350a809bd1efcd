"""Where a rollout records: rows of time, columns of lanes, in memory that stays in place from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freerun.core import Array, EnvSpec, FloatArray, Policy, Segment

FIRST_CAPACITY = 128
NOISE_ROWS = 64
"""Noise is drawn for so many steps at once: a call costs more than a number."""


class Column(Protocol):
    """An episode that is being recorded in one column."""

    index: int
    first_row: int
    rng: np.random.Generator


class Tape:
    """Steps of all lanes, written in one call per field; log-probabilities follow later, many rows at once."""

    def __init__(self, spec: EnvSpec, num_lanes: int, policy: Policy):
        obs, action = spec.observation_space, spec.action_space
        self._num_lanes = num_lanes
        self._policy = policy
        self.row = 0
        self.version = 0
        self._num_scored = 0
        self.obs = np.zeros((FIRST_CAPACITY + 1, num_lanes, *obs.shape), obs.dtype)
        self.action = np.zeros((FIRST_CAPACITY, num_lanes, *spec.action_shape), action.dtype)
        self.head = np.zeros((FIRST_CAPACITY, num_lanes, policy.head_size), np.float32)
        self._reward = np.zeros((FIRST_CAPACITY, num_lanes), np.float32)
        self._log_prob = np.zeros((FIRST_CAPACITY, num_lanes), np.float32)
        self._versions = np.zeros((FIRST_CAPACITY, 1), np.int64)
        self._noise: FloatArray = np.zeros(
            (NOISE_ROWS, num_lanes, *policy.draw(np.random.default_rng(0), 1).shape[1:]), np.float32
        )
        self._noise_row = NOISE_ROWS

    def begin(self, column: Column, first_obs: Array) -> None:
        self.obs[self.row, column.index] = first_obs
        if self._noise_row < NOISE_ROWS:
            self._noise[self._noise_row :, column.index] = self._policy.draw(column.rng, NOISE_ROWS - self._noise_row)

    def noise(self, columns: Sequence[Column]) -> FloatArray:
        """For the next action of every lane, each from its episode's own generator."""
        if self._noise_row == NOISE_ROWS:
            for column in columns:
                self._noise[:, column.index] = self._policy.draw(column.rng, NOISE_ROWS)
            self._noise_row = 0
        self._noise_row += 1
        row: FloatArray = self._noise[self._noise_row - 1]
        return row

    def add(self, reward: Array, next_obs: Array, columns: Sequence[Column]) -> None:
        """Complete the row whose actions and heads are written."""
        self._reward[self.row] = reward
        self._versions[self.row] = self.version
        self.row += 1
        self.obs[self.row] = next_obs
        if self.row == len(self.action):
            self._make_room(columns)

    def rewind(self) -> None:
        """Go on at the first row, from the newest observations."""
        self.obs[0] = self.obs[self.row]
        self.row = self._num_scored = 0

    def score(self) -> None:
        """Work out the log-probabilities of the rows that lack them: before a segment leaves or the weights change."""
        rows = slice(self._num_scored, self.row)
        if rows.start < rows.stop:
            head, action = self.head[rows], self.action[rows]
            flat = self._policy.log_prob(head.reshape(-1, head.shape[2]), action.reshape(-1, *action.shape[2:]))
            self._log_prob[rows] = flat.reshape(-1, self._num_lanes)
            self._num_scored = self.row

    def episode(self, column: Column, number: int) -> Segment:
        """What one lane has recorded since the episode began; views that later rows overwrite."""
        num_steps = self.row - column.first_row
        ends = np.zeros((2, num_steps, 1), np.bool_)
        numbers = np.full((num_steps, 1), number)
        lane = slice(column.index, column.index + 1)
        return self._segment(column.first_row, lane, numbers, ends, self.obs[column.first_row + 1 : self.row + 1, lane])

    def segment(
        self,
        numbers: NDArray[np.int64],
        ends: NDArray[np.bool_],
        successors: Sequence[tuple[int, int, Array]],
    ) -> Segment:
        """All lanes since the first row; `successors` are the last observations of episodes that ended on the way."""
        next_obs = self.obs[1 : self.row + 1].copy()
        for row, index, obs in successors:
            next_obs[row, index] = obs
        return self._segment(0, slice(None), numbers, ends, next_obs)

    def _segment(
        self, first_row: int, lanes: slice, numbers: NDArray[np.int64], ends: NDArray[np.bool_], next_obs: Array
    ) -> Segment:
        self.score()
        rows = slice(first_row, self.row)
        return Segment(
            obs=self.obs[rows, lanes],
            action=self.action[rows, lanes],
            log_prob=self._log_prob[rows, lanes],
            reward=self._reward[rows, lanes],
            terminated=ends[0],
            truncated=ends[1],
            next_obs=next_obs,
            version=np.broadcast_to(self._versions[rows], numbers.shape),
            episode=numbers,
            seconds=0.0,
        )

    def _make_room(self, columns: Sequence[Column]) -> None:
        """Forget rows that no running episode needs; if most are needed, double the tape."""
        oldest = min(column.first_row for column in columns)
        capacity = len(self.action) * (2 if oldest < len(self.action) // 2 else 1)
        for name in ("obs", "action", "head", "_reward", "_log_prob", "_versions"):
            old: Array = getattr(self, name)
            new = np.zeros((capacity + (name == "obs"), *old.shape[1:]), old.dtype)
            new[: len(old) - oldest] = old[oldest:]
            setattr(self, name, new)
        self.row -= oldest
        self._num_scored = max(0, self._num_scored - oldest)
        for column in columns:
            column.first_row -= oldest
