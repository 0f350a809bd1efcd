"""Environments in a process each, stepped together: every step waits for the slowest."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

from freerun.core import (
    Array,
    EnvFactory,
    EnvFailure,
    EnvSpec,
    State,
    StepResult,
    Tracks,
    UserError,
    WorkerDied,
    WorkerHung,
)
from freerun.transport import processes
from freerun.transport.deaths import Coroner, is_stopped
from freerun.transport.stacks import StackFile

Result = TypeVar("Result")


class ParallelLanes:
    """They live behind Gymnasium's AsyncVectorEnv, with shared memory.

    Autoreset is disabled and `reset_mask` used, so that every episode starts from its own seed and no row is garbage.
    After a failure it must not be used again: a late answer would be taken for that to the next question.
    """

    def __init__(self, factory: EnvFactory, num_envs: int, tracks: Tracks, step_timeout: float):
        self.spec = factory.spec
        self.num_envs = num_envs
        self._timeout = step_timeout
        self._coroner = Coroner()
        self._stacks = StackFile()
        processes.context()
        started = list(multiprocessing.active_children())
        with processes.without_main(), processes.nameless_semaphores():
            try:
                self._vector = AsyncVectorEnv(
                    [_LaneInProcess(factory, tracks, self._stacks, index) for index in range(num_envs)],
                    context="forkserver",
                    copy=False,
                    autoreset_mode=AutoresetMode.DISABLED,
                )
            except (EOFError, BrokenPipeError, ConnectionResetError):
                processes.stop([child for child in multiprocessing.active_children() if child not in started], 0.0)
                raise WorkerDied("a process died before its environment was built") from None

    def reset(self, seeds: Sequence[int | None]) -> Array:
        mask = np.array([seed is not None for seed in seeds])
        with self._supervised():
            self._vector.reset_async(seed=list(seeds), options={"reset_mask": mask})
            obs, _ = self._vector.reset_wait(self._timeout)
        return obs  # type: ignore[no-any-return]

    def step(self, action: Array) -> StepResult:
        with self._supervised():
            self._vector.step_async(action)
            obs, reward, terminated, truncated, _ = self._vector.step_wait(self._timeout)
        return StepResult(obs, obs, reward, terminated, truncated)

    @contextlib.contextmanager
    def _supervised(self) -> Iterator[None]:
        with _without_log():
            try:
                yield
            except multiprocessing.TimeoutError:
                raise self._hung() from None
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise self._died() from None

    def _hung(self) -> WorkerHung:
        late = [index for index, pipe in enumerate(self._vector.parent_pipes) if pipe and not pipe.poll()]
        texts, stopped = [], []
        for index in late:
            pid = self._vector.processes[index].pid or 0
            stopped.append(is_stopped(pid))
            how = "stopped by a signal" if stopped[-1] else f"its stack:\n{self._stacks.capture(pid)}"
            texts.append(f"worker {index}: {how}")
        failure = WorkerHung(f"no answer within {self._timeout:g} s (--step-timeout) from " + "\n".join(texts))
        failure.worker, failure.from_outside = late[0] if late else 0, bool(stopped) and all(stopped)
        return failure

    def _died(self) -> EnvFailure:
        processes.wait_for_any(self._vector.processes)
        for index, process in enumerate(self._vector.processes):
            if process.exitcode is not None:
                failure = self._coroner.report(index, process.pid, process.exitcode)
                failure.worker = index
                return failure
        return WorkerDied("a process closed its pipe")

    def close(self) -> None:
        processes.stop(self._vector.processes, 0.0)
        # Ctrl-C may have come in the middle of a message: Gymnasium would wait for the answer and read its other half.
        self._vector._state = AsyncState.DEFAULT
        self._vector.close(terminate=True)
        self._stacks.close()


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """An error in a process is raised here with its traceback; Gymnasium would print it a second time."""
    level = gymnasium.logger.min_level
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    try:
        yield
    finally:
        gymnasium.logger.min_level = level


@dataclass
class _LaneInProcess:
    factory: EnvFactory
    tracks: Tracks
    stacks: StackFile
    index: int

    def __getstate__(self) -> tuple[Any, ...]:
        # Gymnasium pickles it with cloudpickle, which knows nothing of shared memory.
        return self.factory, bytes(ForkingPickler.dumps((self.tracks, self.stacks))), self.index

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.factory, (self.tracks, self.stacks), self.index = state[0], pickle.loads(state[1]), state[2]

    def __call__(self) -> gymnasium.Env[Any, Any]:
        # AsyncVectorEnv also builds one in the learner's process, to look at its spaces.
        if not processes.is_worker():
            return self.factory.make_lane()
        processes.enter_worker()
        self.stacks.write_on_signal()
        try:
            return _Tracked(self.factory.make_lane(), self.tracks, self.index)
        except (UserError, EnvFailure) as failure:
            return _NotBuilt(self.factory.spec, failure)


class _NotBuilt(gymnasium.Env[Any, Any]):
    """In the place of an environment that could not be built: AsyncVectorEnv passes on only what `reset` raises."""

    def __init__(self, spec: EnvSpec, failure: Exception):
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self._failure = failure

    def reset(self, **arguments: Any) -> Any:
        raise self._failure


class _Tracked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes when it is busy; in between it waits for the slowest of those that step with it, and for the learner."""

    def __init__(self, lane: gymnasium.Env[Any, Any], tracks: Tracks, index: int):
        super().__init__(lane)
        self._tracks, self._index = tracks, index

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self._noted(lambda: self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._noted(lambda: self.env.step(action))

    def _noted(self, work: Callable[[], Result]) -> Result:
        self._tracks.enter(self._index, State.BUSY)
        try:
            return work()
        finally:
            self._tracks.enter(self._index, State.WAITING_FOR_OTHERS)
