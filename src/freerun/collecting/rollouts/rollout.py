"""Environments and a policy turned into segments: `env.step` → rollout buffer → segment.

A run steps its environments in three places: here, in `single_env_rollout.py` (the same for a single environment, with
less Python per step) and in `tensor_rollout.py` (environments that are tensors on a device). All three yield the same
kind of segment. The first two share the rules of this module: who names the next episode, that an episode's randomness
comes from its number alone, and that a segment with a number that is not finite is never handed over.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence

import numpy as np

from freerun.collecting.rollouts.finite_check import check_finite
from freerun.collecting.rollouts.rollout_buffer import RolloutBuffer, RunningEpisode
from freerun.core import (
    Array,
    BatchReset,
    Decision,
    FloatArray,
    Policy,
    RunSeed,
    Segment,
    UserError,
    VectorEnv,
    as_memory_policy,
    empty_memory,
    episode_seed,
)
from freerun.transport.heartbeats import Heartbeat

NextEpisode = Callable[[bool], int | None]
"""Returns the number of an episode that may start now, or None. The argument is True when no environment is running:
the rollout then has nothing to do until it gets a number, and None ends it."""
EndFlags = Array | Sequence[bool]
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
