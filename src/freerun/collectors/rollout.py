"""Environments and a policy turned into segments. With `solo.py`, the only caller of `env.step` in a run."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence

import numpy as np

from freerun.collectors.finite import check_finite
from freerun.collectors.tape import Tape
from freerun.core import Array, FloatArray, Policy, RunSeed, Segment, VectorEnv, episode_rng, episode_seed
from freerun.transport.pulse import Vitals

NextEpisode = Callable[[bool], int | None]
"""The number of an episode that may start now, or None. Asked with True when no lane is running: None ends it all."""
Flags = Array | Sequence[bool]


def number_of(steps: int | Callable[[], int]) -> int:
    """Of the next segment: always the same, or to be asked for."""
    return steps() if callable(steps) else steps


def in_order(numbers: Iterable[int]) -> NextEpisode:
    """These episodes, one after another."""
    iterator = iter(numbers)
    return lambda wait: next(iterator, None)


def noted(begun: MutableSequence[int] | ctypes.Array[ctypes.c_longlong], worker: int, stride: int) -> Iterator[int]:
    """Every `stride`-th number after the one noted for a worker, each noted before it is played."""
    while True:
        begun[worker] += stride
        yield begun[worker]


class Lane:
    """One environment's episode while it runs."""

    def __init__(self, number: int, index: int, run_seed: RunSeed, first_row: int):
        self.number = number
        self.index = index
        self.rng = episode_rng(run_seed, number)
        self.first_row = first_row
        self.num_before = 0  # steps of it when the segment began
        self.started = time.perf_counter()


class Rollout:
    """Plays episodes in the lanes of a vector environment and records them on a tape.

    Segments are views of the tape: take what you need of one before you ask for the next.
    """

    def __init__(self, env: VectorEnv, policy: Policy, run_seed: RunSeed):
        self._env = env
        self.num_envs = env.num_envs
        self._policy = policy
        self._run_seed = run_seed
        self.vitals = Vitals()
        self._tape = Tape(env.spec, env.num_envs, policy)
        self._lanes: list[Lane | None] = [None] * env.num_envs
        self._running: list[Lane] = []
        self._padded = np.zeros((env.num_envs, *env.spec.action_shape), env.spec.action_space.dtype)

    def load(self, weights: FloatArray, version: int) -> None:
        self._tape.score()
        self._tape.version = version
        self._policy.load(weights)

    def episodes(self, next_episode: NextEpisode) -> Iterator[Segment]:
        """Whole episodes, each as it ends, until there is no next one."""
        while True:
            if not self._running:
                self._tape.rewind()
            if not self._begin(next_episode, self._tape.row):
                return
            terminated, truncated = self._step()
            for lane in self._ended(terminated, truncated):
                segment = self._tape.episode(lane, lane.number)
                segment.terminated[-1], segment.truncated[-1] = terminated[lane.index], truncated[lane.index]
                segment.seconds = time.perf_counter() - lane.started
                check_finite(segment, self._run_seed)
                yield segment

    def segments(self, steps: int | Callable[[], int], next_episode: NextEpisode) -> Iterator[Segment]:
        """All lanes for so many steps at a time, without end; a lane whose episode has ended takes the next one."""
        while True:
            started, num_steps = time.perf_counter(), number_of(steps)
            self._tape.rewind()
            self._begin(next_episode, first_row=0)
            for lane in self._running:
                lane.first_row = 0
            before = [lane.num_before for lane in self._running]
            ends = np.zeros((2, num_steps, len(self._lanes)), np.bool_)
            numbers = np.empty(ends.shape[1:], np.int64)
            successors = []
            for row in range(num_steps):
                numbers[row] = [lane.number for lane in self._running]
                terminated, truncated = self._step()
                if ended := self._ended(terminated, truncated):
                    ends[0, row], ends[1, row] = terminated, truncated
                    successors += [(row, lane.index, self._tape.obs[row + 1, lane.index].copy()) for lane in ended]
                    self._begin(next_episode, first_row=0)
            segment = self._tape.segment(numbers, ends, successors)
            segment.seconds = time.perf_counter() - started
            check_finite(segment, self._run_seed, before)
            for lane in self._running:
                lane.num_before += num_steps
            yield segment

    def _step(self) -> tuple[Flags, Flags]:
        """One step of every lane, onto the tape."""
        tape, running = self._tape, self._running
        row = tape.row
        if len(running) == len(self._lanes):
            decision = self._policy.act(tape.obs[row], tape.noise(running))
            tape.action[row], tape.head[row] = decision
            action = decision.action
        else:  # lanes at rest get an action too, and ignore it
            lanes = [lane.index for lane in running]
            decision = self._policy.act(tape.obs[row, lanes], tape.noise(running)[lanes])
            tape.action[row, lanes], tape.head[row, lanes] = decision
            action = self._padded
            action[lanes] = decision.action
        self.vitals.beat()
        result = self._env.step(action)
        tape.add(result.reward, result.final_obs, running)
        return result.terminated, result.truncated

    def _begin(self, next_episode: NextEpisode, first_row: int) -> bool:
        """Start the next episodes in the lanes that are free, recorded from `first_row` on; False when nothing runs."""
        if len(self._running) == len(self._lanes):
            return True
        numbers: dict[int, int] = {}
        for index, lane in enumerate(self._lanes):
            if lane is None:
                number = next_episode(not self._running and not numbers)
                if number is None:
                    break
                numbers[index] = number
        if numbers:
            seeds: list[int | None] = [None] * len(self._lanes)
            for index, number in numbers.items():
                seeds[index] = episode_seed(self._run_seed, number)
                self.vitals.begin(number)
            self.vitals.beat()
            obs = self._env.reset(seeds)
            for index, number in numbers.items():
                lane = self._lanes[index] = Lane(number, index, self._run_seed, first_row)
                lane.num_before = -self._tape.row
                self._tape.begin(lane, obs[index])
            self._running = [lane for lane in self._lanes if lane is not None]
        return bool(self._running)

    def _ended(self, terminated: Flags, truncated: Flags) -> list[Lane]:
        """The lanes whose episode has just ended; they are free now."""
        if not (True in terminated or True in truncated):
            return []
        ended = [lane for lane in self._running if terminated[lane.index] or truncated[lane.index]]
        for lane in ended:
            self._lanes[lane.index] = None
        self._running = [lane for lane in self._lanes if lane is not None]
        return ended

    def close(self) -> None:
        self._env.close()
