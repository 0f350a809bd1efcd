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

from freerun.collectors.rollout import Rollout, in_order
from freerun.collectors.solo import Solo
from freerun.core import CollectorSettings, EnvFactory, EnvFailure, Policy, RunSeed, Segment, State, Tracks, UserError
from freerun.transport import processes
from freerun.transport.pulse import NO_EPISODE, Pulse
from freerun.transport.stacks import StackFile
from freerun.transport.weights import WeightsBoard

YOUNG_OBJECTS = 10_000
"""So many new ones before Python looks for cycles among them. At its own 700 (2,000 since 3.13) it looks several times
in every episode of a simulator written in Python, most of which make none."""


class Monitor:
    """Where workers show that they are alive, and where their stacks go."""

    def __init__(self, num_workers: int):
        self.pulse = Pulse(num_workers, processes.context())
        self.stacks = StackFile()

    def close(self) -> None:
        self.stacks.close()


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker is started with. Factory and policy travel as bytes, for a factory may hold a lambda."""

    factory_and_policy: bytes
    board: WeightsBoard
    monitor: Monitor
    run_seed: RunSeed
    tracks: Tracks
    num_envs: int = 1

    @classmethod
    def pack(
        cls,
        factory: EnvFactory,
        policy: Policy,
        board: WeightsBoard,
        monitor: Monitor,
        settings: CollectorSettings,
        num_envs: int = 1,
    ) -> WorkerSetup:
        return cls(cloudpickle.dumps((factory, policy)), board, monitor, settings.seed, settings.tracks, num_envs)


def make_rollout(factory: EnvFactory, policy: Policy, run_seed: RunSeed, num_envs: int) -> Rollout | Solo:
    if num_envs == 1:
        return Solo(factory.make_lane(), factory.spec, policy, run_seed)
    return Rollout(factory.make(num_envs), policy, run_seed)


class Worker:
    """Environments and a policy that stay warm between episodes."""

    def __init__(self, setup: WorkerSetup, index: int):
        processes.enter_worker()
        setup.monitor.stacks.write_on_signal()
        self.enter: Callable[[State], None] = functools.partial(setup.tracks.enter, index)
        factory, policy = pickle.loads(setup.factory_and_policy)
        self.index = index
        self._board = setup.board
        self._version = -1
        self.rollout = make_rollout(factory, policy, setup.run_seed, setup.num_envs)
        self.rollout.vitals = setup.monitor.pulse.of(index)
        self.close = Finalize(None, self.rollout.close, exitpriority=0)  # simulators may hold more than memory
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self.enter(State.WAITING_FOR_WEIGHTS)

    def refresh(self) -> None:
        """Take the newest weights; at first, wait for them: a run that is resumed does not begin with version 0."""
        if self._version < 0 or self._board.version != self._version:
            weights, self._version = self._board.read()
            self.rollout.load(weights, self._version)

    def run_episode(self, number: int) -> Segment:
        self.enter(State.BUSY)
        self.refresh()
        segment = next(self.rollout.episodes(in_order([number])))
        self.rollout.vitals.begin(NO_EPISODE)
        self.enter(State.WAITING_FOR_WEIGHTS)
        return segment


@contextlib.contextmanager
def reporting(send: Callable[[Exception], None]) -> Iterator[None]:
    """A worker's life: it ends in silence when the learner has closed the pipe, and with a word when it fails."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (UserError, EnvFailure) as failure:
        send(failure)
    except Exception:
        send(EnvFailure(f"a worker failed:\n{traceback.format_exc()}"))
