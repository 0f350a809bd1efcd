"""`pipes`: persistent worker processes, a pipe each; whole episodes, handed over as each finishes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from freerun.collectors.crew import Crew, Peer
from freerun.collectors.rounds import Rounds
from freerun.collectors.worker import Monitor, Worker, WorkerSetup, reporting
from freerun.core import CollectorSettings, EnvFactory, Policy, Segment
from freerun.transport import processes
from freerun.transport.weights import WeightsBoard


class Pipes(Crew):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        board = WeightsBoard(processes.context(), policy.weights.size)
        monitor = Monitor(settings.most_workers)
        super().__init__(settings, Rounds(settings.max_lag, start=settings.start), board, monitor)
        self._setup = WorkerSetup.pack(factory, policy, board, monitor, settings)
        self._start()

    def _target(self, index: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _work, (self._setup, index)

    def _receive(self, peer: Peer, message: bytes) -> tuple[int, Segment] | None:
        content = pickle.loads(message)
        if isinstance(content, Exception):
            raise content
        if not isinstance(content, Segment):
            peer.ready = True
            return None
        return peer.units[0], content

    def _grant(self, peer: Peer, unit: int) -> None:
        peer.connection.send(unit)


def _work(connection: Connection, setup: WorkerSetup, index: int) -> None:
    """The worker: an episode's number comes in, the episode goes out, until the pipe closes."""
    with reporting(connection.send):
        worker = Worker(setup, index)
        connection.send("ready")
        while True:
            connection.send(worker.run_episode(connection.recv()))
