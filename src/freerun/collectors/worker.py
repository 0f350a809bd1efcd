"""What a worker process holds: its environments, a policy, and the board where the newest weights are."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.util import Finalize

import cloudpickle

from freerun.collectors.rollout import Rollout
from freerun.core import EnvFactory, Policy, Segment
from freerun.transport import processes
from freerun.transport.weights import WeightsBoard


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker is started with. Factory and policy travel as bytes, for a factory may hold a lambda."""

    factory_and_policy: bytes
    board: WeightsBoard
    run_seed: int

    @classmethod
    def pack(cls, factory: EnvFactory, policy: Policy, board: WeightsBoard, run_seed: int) -> WorkerSetup:
        return cls(cloudpickle.dumps((factory, policy)), board, run_seed)


class Worker:
    """Runs one episode at a time with the newest weights; environment and policy stay warm between episodes."""

    def __init__(self, setup: WorkerSetup):
        processes.enter_worker()
        factory, policy = pickle.loads(setup.factory_and_policy)
        self._board = setup.board
        self._version = -1
        self._rollout = Rollout(factory.make(1), policy, setup.run_seed)
        Finalize(None, self._rollout.close, exitpriority=0)  # simulators may hold more than memory

    def run_episode(self, number: int) -> Segment:
        if self._board.version != self._version:
            weights, self._version = self._board.read()
            self._rollout.load(weights, self._version)
        (segment,) = self._rollout.run(iter([number]))
        return segment
