"""Environments and a policy turned into segments: `env.step` → rollout buffer → segment.

A run steps its environments in three places: here, in `single_env_rollout.py` (the same for a single environment, with
less Python per step) and in `tensor_rollout.py` (environments that are tensors on a device). All three yield the same
kind of segment. The first two share their rules: who names the next episode (`episode_numbers.py`), that an episode's
randomness comes from its number alone, and that a segment with a number that is not finite is never handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from freerun.collecting.rollouts.episode_numbers import RESETS_ITSELF, NextEpisode, NoNextEpisode, resolve_num_steps
from freerun.collecting.rollouts.finite_check import check_finite
from freerun.core import (
    Array,
    BatchReset,
    Decision,
    EnvSpec,
    FloatArray,
    Policy,
    RunSeed,
    Segment,
    UserError,
    VectorEnv,
    as_memory_policy,
    empty_memory,
    episode_rng,
    episode_seed,
)
from freerun.transport.heartbeats import Heartbeat

EndFlags = Array | Sequence[bool]
Number = TypeVar("Number", bound=np.generic)

FIRST_CAPACITY = 128
"""Rows of a new buffer. A buffer doubles when its running episodes need more."""
NOISE_ROWS = 64
"""Noise is drawn for this many steps in one call, because a call of the generator costs more than a number."""


class Rollout:
    """Plays episodes in the environments of a `VectorEnv` and records them in a buffer.

    Segments are views of the buffer: take what you need of one before you ask for the next.
    """

    def __init__(self, env: VectorEnv, policy: Policy, run_seed: RunSeed):
        self._env = env
        self.num_envs = env.num_envs
        self._policy = policy
        self._run_seed = run_seed
        self.heartbeat = Heartbeat()
        """Counts resets and steps. Workers replace it by one that lies in shared memory."""
        self.buffer = RolloutBuffer(env.spec, env.num_envs, policy)
        self._episode_of_env: list[RunningEpisode | None] = [None] * env.num_envs
        self._running: list[RunningEpisode] = []  # the same without None, so that a step need not search
        self._memory = empty_memory(policy, env.num_envs)
        remembering = as_memory_policy(policy)
        self._act_from = None if remembering is None else remembering.act_from
        self._in_reset: list[RunningEpisode] = []  # whose environments spend the next step on their reset
        self._padded_action = np.zeros((env.num_envs, *env.spec.action_shape), env.spec.action_space.dtype)

    def load(self, weights: FloatArray, version: int) -> None:
        # Steps that the old weights chose need their log-probabilities from the old weights.
        self.buffer.compute_log_probs()
        self.buffer.version = version
        self._policy.load(weights)

    def episodes(self, next_episode: NextEpisode) -> Iterator[Segment]:
        """Yield whole episodes, each as soon as it ends, until there is no next one."""
        if not self._env.spec.batch_reset.seeds_episodes:
            raise UserError(f"{RESETS_ITSELF}: give --segment-steps, or one environment per worker")
        buffer = self.buffer
        while True:
            if not self._running:
                buffer.rewind()
            if not self._begin(next_episode, first_row=buffer.row):
                return
            terminated, truncated = self._step()
            for episode in self._release_ended(terminated, truncated):
                segment = buffer.episode(episode)
                segment.terminated[-1], segment.truncated[-1] = terminated[episode.column], truncated[episode.column]
                segment.seconds = time.perf_counter() - episode.started_at
                check_finite(segment, self._run_seed)
                yield segment

    def segments(self, num_steps: int | Callable[[], int], next_episode: NextEpisode) -> Iterator[Segment]:
        """Yield `num_steps` steps of all environments at a time, without end.

        Where an episode ends within a segment, its environment begins the next one in the following row. Where rows are
        no steps (`Segment.resting`), a segment has more rows, so that it has as many steps.
        """
        buffer = self.buffer
        while True:
            started_at, num_rows = time.perf_counter(), resolve_num_steps(num_steps)
            buffer.rewind()
            self._begin(next_episode, first_row=0)
            self._require_all_running()
            for episode in self._running:
                episode.first_row = 0
            num_steps_before = [episode.num_steps_before for episode in self._running]
            memory = None if self._memory is None else self._memory.copy()
            rests = self._env.spec.batch_reset is BatchReset.NEXT_STEP
            # A step follows every row in which an environment rests, so twice as many rows are always enough.
            most_rows = 2 * num_rows if rests else num_rows
            ends = np.zeros((2, most_rows, self.num_envs), np.bool_)
            numbers = np.empty((most_rows, self.num_envs), np.int64)
            resting = np.zeros((most_rows, self.num_envs), np.bool_) if rests else None
            final_obs = []
            row, num_missing = -1, num_rows * self.num_envs
            while num_missing > 0:
                row += 1
                numbers[row] = [episode.number for episode in self._running]
                terminated, truncated = self._step()
                num_missing -= self.num_envs
                if resting is not None and self._in_reset:
                    columns = [episode.column for episode in self._in_reset]
                    resting[row, columns] = True
                    if self._memory is not None:  # the policy has acted on what is no observation of the episode
                        self._memory[columns] = 0
                    num_missing += len(self._in_reset)
                    for episode in self._in_reset:
                        episode.num_steps_before -= 1
                    self._in_reset = []
                if ended := self._release_ended(terminated, truncated):
                    ends[0, row], ends[1, row] = terminated, truncated
                    # The first observation of the next episode is about to overwrite these in the buffer.
                    final_obs += [
                        (row, episode.column, buffer.obs[row + 1, episode.column].copy()) for episode in ended
                    ]
                    self._begin(next_episode, first_row=0)
                    if rests:
                        ended_columns = {episode.column for episode in ended}
                        self._in_reset = [episode for episode in self._running if episode.column in ended_columns]
                    if num_missing > 0:  # a segment may end with its last episode
                        self._require_all_running()
            num_rows = row + 1
            segment = buffer.segment(numbers[:num_rows], ends[:, :num_rows], final_obs)
            segment.memory = memory
            if resting is not None and resting.any():
                segment.resting = resting[:num_rows]
            segment.seconds = time.perf_counter() - started_at
            check_finite(segment, self._run_seed, num_steps_before)
            for episode in self._running:
                episode.num_steps_before += num_rows
            yield segment

    def _step(self) -> tuple[EndFlags, EndFlags]:
        """Make one step of every environment and record it; return where episodes terminated or were truncated."""
        buffer, running = self.buffer, self._running
        row = buffer.row
        if len(running) == self.num_envs:
            decision = self._choose(buffer.obs[row], buffer.next_noise(running), self._memory)
            buffer.action[row], buffer.head[row] = decision
            action = decision.action
        else:  # environments without an episode are passed an action too, and ignore it
            columns = [episode.column for episode in running]
            memory = None if self._memory is None else self._memory[columns]
            decision = self._choose(buffer.obs[row, columns], buffer.next_noise(running)[columns], memory)
            if self._memory is not None:
                self._memory[columns] = memory
            buffer.action[row, columns], buffer.head[row, columns] = decision
            action = self._padded_action
            action[columns] = decision.action
        self.heartbeat.beat()
        result = self._env.step(action)
        buffer.complete_row(result.reward, result.final_obs, running)
        return result.terminated, result.truncated

    def _choose(self, obs: Array, noise: FloatArray, memory: FloatArray | None) -> Decision:
        """Let the policy act; one with a memory replaces `memory` by what it remembers now."""
        if memory is None or self._act_from is None:
            return self._policy.act(obs, noise)
        return self._act_from(obs, noise, memory)

    def _begin(self, next_episode: NextEpisode, first_row: int) -> bool:
        """Start episodes in the environments that are free, recorded from `first_row` on; False if none is running."""
        if len(self._running) == self.num_envs:
            return True
        numbers: dict[int, int] = {}
        for column, episode in enumerate(self._episode_of_env):
            if episode is None:
                number = next_episode(not self._running and not numbers)
                if number is None:
                    break
                numbers[column] = number
        if numbers:
            seeds: list[int | None] = [None] * self.num_envs
            for column, number in numbers.items():
                seeds[column] = episode_seed(self._run_seed, number)
                # Before the reset, so that a reset that hangs or kills the process is blamed on this episode.
                self.heartbeat.begin_episode(number)
            self.heartbeat.beat()
            obs = self._env.reset(seeds)
            if self._memory is not None:
                self._memory[list(numbers)] = 0
            for column, number in numbers.items():
                begun = RunningEpisode(number, column, self._run_seed, first_row, self.buffer.row)
                self._episode_of_env[column] = begun
                self.buffer.begin(begun, obs[column])
            self._update_running()
        return bool(self._running)

    def _release_ended(self, terminated: EndFlags, truncated: EndFlags) -> list[RunningEpisode]:
        """Free the environments whose episode has just ended, and return those episodes."""
        # `in` looks through a list or an array in C, and nearly all steps end here.
        if not (True in terminated or True in truncated):
            return []
        ended = [episode for episode in self._running if terminated[episode.column] or truncated[episode.column]]
        for episode in ended:
            self._episode_of_env[episode.column] = None
        self._update_running()
        return ended

    def _require_all_running(self) -> None:
        if len(self._running) < self.num_envs:
            raise NoNextEpisode(f"only {len(self._running)} of {self.num_envs} environments have an episode to play")

    def _update_running(self) -> None:
        self._running = [episode for episode in self._episode_of_env if episode is not None]

    def close(self) -> None:
        self._env.close()


# ---------------------------------------------------------------------------------------------- the buffer


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
