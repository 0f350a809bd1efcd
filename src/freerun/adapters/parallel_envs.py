"""Environments in one process each that are stepped together: every step waits for the slowest of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

from freerun.core import (
    ENV_ARGS_OPTION,
    Array,
    BatchReset,
    EnvArgsBox,
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
from freerun.transport.exit_diagnosis import ExitDiagnosis, is_stopped
from freerun.transport.stack_capture import StackFile

Result = TypeVar("Result")


class ParallelEnvs:
    """A `VectorEnv` on top of Gymnasium's AsyncVectorEnv, whose observations lie in shared memory.

    Autoreset is disabled and `reset_mask` used instead, so that every episode starts from its own seed.
    After a failure it must not be used again: a late answer would be taken for the answer to the next request.
    """

    def __init__(
        self, factory: EnvFactory, num_envs: int, tracks: Tracks, step_timeout: float, box: EnvArgsBox | None = None
    ):
        """`box` is where changed arguments of the environments arrive, if there are any."""
        self._box = box
        # Each has a process of its own, and is reset there: also one that could be stepped together with others.
        self.spec = replace(factory.spec, batch_reset=BatchReset.ON_CALL)
        self.num_envs = num_envs
        self._timeout = step_timeout
        self._exit_diagnosis = ExitDiagnosis()
        self._stacks = StackFile()
        # Starts the fork server here, with our preloaded modules; AsyncVectorEnv would start one without them.
        processes.context()
        with processes.without_main(), processes.nameless_semaphores():
            builders = [_EnvInProcess(factory, tracks, self._stacks, index) for index in range(num_envs)]
            others = set(multiprocessing.active_children())
            try:
                _Vector(builders, self._wait_until_built)
            except OSError as error:  # the pipe through which a process gets its instructions has broken
                processes.stop(set(multiprocessing.active_children()) - others, 0.0)
                self._stacks.close()
                failure = WorkerDied(f"a process died before it could build its environment: {error}")
                failure.from_outside = failure.may_be_the_environment = True
                raise failure from None

    def _wait_until_built(self, vector: _Vector) -> None:
        """Wait until all environments are built, and compare their spaces.

        Building may take longer than the step timeout, unless a signal has stopped the process.
        """
        self._vector = vector
        deadline = time.monotonic() + max(processes.START_SECONDS, self._timeout)
        try:
            with self._explaining_failures():
                vector.call_async("action_space")  # any request: the answer comes when the environment is built
                while not vector._poll_pipe_envs(self._timeout):
                    if time.monotonic() > deadline or any(is_stopped(self._pid(index)) for index in self._late()):
                        raise self._hung()
                vector.call_wait()
                vector.check_spaces()
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int | None]) -> Array:
        mask = np.array([seed is not None for seed in seeds])
        options: dict[str, Any] = {"reset_mask": mask}
        if self._box is not None and self._box.newest[0]:
            options[ENV_ARGS_OPTION] = self._box.newest
        with self._explaining_failures():
            self._vector.reset_async(seed=list(seeds), options=options)
            obs, _ = self._vector.reset_wait(self._timeout)
        return obs  # type: ignore[no-any-return]

    def step(self, action: Array) -> StepResult:
        with self._explaining_failures():
            self._vector.step_async(action)
            obs, reward, terminated, truncated, _ = self._vector.step_wait(self._timeout)
        return StepResult(obs, obs, reward, terminated, truncated)

    @contextlib.contextmanager
    def _explaining_failures(self) -> Iterator[None]:
        with _without_log():
            try:
                yield
            except multiprocessing.TimeoutError:
                raise self._hung() from None
            except (
                EOFError,
                OSError,
            ):  # an OSError without errno: it was killed in the middle of a message
                raise self._died() from None

    def _late(self) -> list[int]:
        """The environments that have not answered yet."""
        return [index for index, pipe in enumerate(self._vector.parent_pipes) if pipe and not pipe.poll()]

    def _pid(self, index: int) -> int:
        return self._vector.processes[index].pid or 0

    def _hung(self) -> WorkerHung:
        late = self._late()
        texts, stopped = [], []
        for index in late:
            pid = self._pid(index)
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
                failure = self._exit_diagnosis.diagnose(index, process.pid, process.exitcode)
                failure.worker = index
                return failure
        return WorkerDied("a process closed its pipe")

    def close(self) -> None:
        processes.stop(self._vector.processes, 0.0)
        # Ctrl-C may have come in the middle of a message. In any other state, Gymnasium's `close` would wait for the
        # answer and read the second half of that message.
        self._vector._state = AsyncState.DEFAULT
        self._vector.close(terminate=True)
        self._stacks.close()


class _Vector(AsyncVectorEnv):
    """An AsyncVectorEnv whose constructor ends with `wait_until_built` instead of a wait without a time limit.

    The wait must happen within the constructor: some of what the processes need to start exists only until its end.
    """

    def __init__(self, builders: list[_EnvInProcess], wait_until_built: Callable[[_Vector], None]):
        self._wait_until_built = wait_until_built
        # copy=False: observations are views of the shared memory, which the next step overwrites.
        super().__init__(builders, context="forkserver", copy=False, autoreset_mode=AutoresetMode.DISABLED)

    def _check_spaces(self) -> None:  # the last call of AsyncVectorEnv's constructor
        self._wait_until_built(self)

    def check_spaces(self) -> None:
        super()._check_spaces()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Silence Gymnasium's logger: an error in a process is raised with its traceback, and would be printed twice."""
    level = gymnasium.logger.min_level
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    try:
        yield
    finally:
        gymnasium.logger.min_level = level


@dataclass
class _EnvInProcess:
    """What AsyncVectorEnv calls in each process to build the environment."""

    factory: EnvFactory
    tracks: Tracks
    stacks: StackFile
    index: int

    def __getstate__(self) -> tuple[Any, ...]:
        # Gymnasium pickles this object with cloudpickle, which cannot pickle shared memory; ForkingPickler can.
        return self.factory, bytes(ForkingPickler.dumps((self.tracks, self.stacks))), self.index

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.factory, (self.tracks, self.stacks), self.index = state[0], pickle.loads(state[1]), state[2]

    def __call__(self) -> gymnasium.Env[Any, Any]:
        # AsyncVectorEnv also builds one environment in the learner's process, to read its spaces.
        if not processes.is_worker():
            return self.factory.make_one()
        processes.enter_worker()
        self.stacks.write_on_signal()
        try:
            return _Tracked(self.factory.make_one(), self.tracks, self.index)
        except (UserError, EnvFailure) as failure:
            return _NotBuilt(self.factory.spec, failure)


class _NotBuilt(gymnasium.Env[Any, Any]):
    """Stands for an environment that could not be built, and raises the reason in `reset`.

    AsyncVectorEnv passes on what `reset` raises, but not what a constructor raises."""

    def __init__(self, spec: EnvSpec, failure: Exception):
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self._failure = failure

    def reset(self, **arguments: Any) -> Any:
        raise self._failure


class _Tracked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes to its track when it is busy. In between it waits for the slowest environment, and for the learner."""

    def __init__(self, env: gymnasium.Env[Any, Any], tracks: Tracks, index: int):
        super().__init__(env)
        self._tracks, self._index = tracks, index

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self._while_busy(lambda: self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._while_busy(lambda: self.env.step(action))

    def _while_busy(self, work: Callable[[], Result]) -> Result:
        self._tracks.set_state(self._index, State.BUSY)
        try:
            return work()
        finally:
            self._tracks.set_state(self._index, State.WAITING_FOR_OTHERS)
