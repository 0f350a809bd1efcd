"""What a worker process holds: its environments, a policy, and the board where the newest weights are."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize

import cloudpickle

from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.core import CollectorSettings, EnvFactory, EnvFailure, Policy, RunSeed, Segment, State, Tracks, UserError
from freerun.transport import processes
from freerun.transport.heartbeats import NO_EPISODE, Heartbeats
from freerun.transport.stack_capture import StackFile
from freerun.transport.weights_board import WeightsBoard

YOUNG_OBJECTS = 10_000
"""Python looks for reference cycles after this many new objects. With its own threshold, 700 (2,000 since 3.13), it
looks several times in every episode of a simulator written in Python, and most simulators make no cycles."""


class WorkerMonitor:
    """Shared memory where workers show that they are alive, and a file that their stacks are written to."""

    def __init__(self, num_workers: int):
        self.heartbeats = Heartbeats(num_workers, processes.context())
        self.stacks = StackFile()

    def close(self) -> None:
        self.stacks.close()


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that a worker process is started with."""

    factory_and_policy: bytes
    """Both are pickled with cloudpickle, because a factory may hold a lambda."""
    board: WeightsBoard
    monitor: WorkerMonitor
    run_seed: RunSeed
    tracks: Tracks
    num_envs: int = 1

    @classmethod
    def pack(cls, factory: EnvFactory, policy: Policy, settings: CollectorSettings, num_envs: int = 1) -> WorkerSetup:
        """Make the setup of all workers of a mode, with the memory that they share with the learner."""
        board = WeightsBoard(processes.context(), policy.weights.size)
        monitor = WorkerMonitor(settings.max_workers)
        return cls(cloudpickle.dumps((factory, policy)), board, monitor, settings.seed, settings.tracks, num_envs)


def make_rollout(factory: EnvFactory, policy: Policy, run_seed: RunSeed, num_envs: int) -> Rollout | SingleEnvRollout:
    """Build environments and the rollout that steps them: a faster one where there is a single environment."""
    if num_envs == 1:
        return SingleEnvRollout(factory.make_one(), factory.spec, policy, run_seed)
    return Rollout(factory.make(num_envs), policy, run_seed)


class Worker:
    """Environments and a policy that stay warm between episodes."""

    def __init__(self, setup: WorkerSetup, index: int):
        processes.enter_worker()
        setup.monitor.stacks.write_on_signal()
        self.enter: Callable[[State], None] = functools.partial(setup.tracks.set_state, index)
        factory, policy = pickle.loads(setup.factory_and_policy)
        self.index = index
        self._board = setup.board
        self._version = -1
        self.rollout = make_rollout(factory, policy, setup.run_seed, setup.num_envs)
        self.rollout.heartbeat = setup.monitor.heartbeats.writer(index)
        # Simulators may hold more than memory: multiprocessing runs this when the process ends, if nobody did before.
        self.close = Finalize(None, self.rollout.close, exitpriority=0)
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self.enter(State.WAITING_FOR_WEIGHTS)

    def refresh(self) -> None:
        """Take the newest weights. The first time, wait for them: a resumed run does not begin with version 0."""
        # Reading the board's version is one load; the weights are copied only when it has moved.
        if self._version < 0 or self._board.version != self._version:
            weights, self._version = self._board.read()
            self.rollout.load(weights, self._version)

    def run_episode(self, number: int) -> Segment:
        self.enter(State.BUSY)
        self.refresh()
        segment = next(self.rollout.episodes(next_from([number])))
        self.rollout.heartbeat.begin_episode(NO_EPISODE)
        self.enter(State.WAITING_FOR_WEIGHTS)
        return segment


def describe_failure(failure: Exception) -> UserError | EnvFailure:
    """Return a failure as it is, or with its traceback as text, because not every exception can be pickled."""
    if isinstance(failure, (UserError, EnvFailure)):
        return failure
    return EnvFailure(f"a worker failed:\n{''.join(traceback.format_exception(failure))}")


@contextlib.contextmanager
def reporting(send: Callable[[Exception], None]) -> Iterator[None]:
    """Wrap a worker's life: it ends silently when the learner has closed the pipe, and reports any other failure."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as failure:
        send(describe_failure(failure))
