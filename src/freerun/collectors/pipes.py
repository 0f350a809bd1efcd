"""`pipes`: persistent worker processes, a pipe each; whole episodes, handed over as each finishes."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import TypeVar

from freerun.collectors.rounds import Rounds
from freerun.collectors.worker import Worker, WorkerSetup
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    EnvFactory,
    EnvFailure,
    FloatArray,
    Policy,
    Segment,
    UserError,
)
from freerun.transport import processes
from freerun.transport.channel import Hub
from freerun.transport.weights import WeightsBoard

Result = TypeVar("Result")

SHORT_EPISODE_SECONDS = 0.05
EPISODES_AHEAD = 4
"""Short episodes are dealt out ahead so that a worker need not wait for its next number; long ones one by one."""
MAX_DEATHS_IN_A_ROW = 3
CLOSE_SECONDS = 1.0


@dataclass(eq=False)
class _Peer:
    """A worker as the learner sees it."""

    process: ForkServerProcess
    connection: Connection
    ready: bool = False
    episodes: deque[int] = field(default_factory=deque)
    """Sent to the worker and not back yet, oldest first."""
    num_ahead: int = 1


class Pipes:
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        context = processes.context()
        self.num_workers = settings.num_workers
        self._rounds = Rounds(settings.max_lag)
        self._board = WeightsBoard(context, policy.weights.size)
        self._setup = WorkerSetup.pack(factory, policy, self._board, settings.seed)
        self._hub: Hub[_Peer] = Hub()
        self._peers: list[_Peer] = []
        self._deaths_in_a_row = 0
        self._changed = threading.Condition()  # guards the rounds and the failure
        self._failure: Exception | None = None
        self._closing = False
        # Workers are fed and heard by a thread of its own, so that they go on while the learner updates.
        self._pump = threading.Thread(target=self._serve, name="freerun-pipes", daemon=True)
        try:
            for _ in range(self.num_workers):
                self._start_worker()
            self._pump.start()
            self._wait_for(lambda: all(peer.ready for peer in self._peers) or None)
        except BaseException:
            self.close()
            raise

    def counts(self) -> Counts:
        with self._changed:
            return self._rounds.counts()

    def publish(self, weights: FloatArray, version: int) -> None:
        self._board.publish(weights, version)
        with self._changed:
            self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        with self._changed:
            if not demand:
                self._raise_failure()
                return self._rounds.take_arrived()
            self._rounds.open(demand)
        self._hub.wake()
        return self._wait_for(self._rounds.take)

    def _wait_for(self, attempt: Callable[[], Result | None]) -> Result:
        """Try after every change until there is a result."""
        with self._changed:
            while True:
                self._raise_failure()
                if (result := attempt()) is not None:
                    return result
                self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------ the pump thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                for peer in self._hub.ready():
                    self._hear(peer)
                with self._changed:
                    for peer in self._peers:
                        self._feed(peer)
                    self._changed.notify_all()
        except Exception as failure:  # reaches the user through `collect`
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _hear(self, peer: _Peer) -> None:
        try:
            message = peer.connection.recv()
        except (EOFError, ConnectionResetError):
            self._replace(peer)
            return
        if isinstance(message, Exception):
            raise message
        with self._changed:
            if isinstance(message, Segment):
                self._rounds.finish(message)
                peer.episodes.popleft()
                peer.num_ahead = EPISODES_AHEAD if message.seconds < SHORT_EPISODE_SECONDS else 1
                self._deaths_in_a_row = 0
            else:
                peer.ready = True

    def _feed(self, peer: _Peer) -> None:
        while peer.ready and len(peer.episodes) < peer.num_ahead:
            number = self._rounds.next()
            if number is None:
                return
            peer.episodes.append(number)
            try:
                peer.connection.send(number)
            except (BrokenPipeError, ConnectionResetError):
                return  # the worker has died; its end-of-file is on its way to `_hear`

    def _replace(self, peer: _Peer) -> None:
        self._hub.remove(peer.connection)
        peer.connection.close()
        peer.process.join()
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            raise EnvFailure(
                f"{self._deaths_in_a_row} workers died in a row without finishing an episode; "
                f"the last one ended with exit code {peer.process.exitcode}"
            )
        with self._changed:
            self._peers.remove(peer)
            for number in peer.episodes:
                self._rounds.lost(number)
            self._rounds.book.worker_restarts += 1
        self._start_worker()

    def _start_worker(self) -> None:
        ours, theirs = processes.context().Pipe()
        process = processes.start(_work, theirs, self._setup)
        theirs.close()
        peer = _Peer(process, ours)
        self._peers.append(peer)
        self._hub.add(ours, peer)

    def close(self) -> None:
        self._closing = True
        self._hub.wake()
        if self._pump.is_alive():
            self._pump.join(CLOSE_SECONDS)
        if self._pump.is_alive():  # held up by a worker that stopped in the middle of a message
            processes.stop([peer.process for peer in self._peers], grace_seconds=0.0)
            self._pump.join()
        for peer in self._peers:
            peer.connection.close()
        processes.stop([peer.process for peer in self._peers], CLOSE_SECONDS)
        self._hub.close()


def _work(connection: Connection, setup: WorkerSetup) -> None:
    """The worker: an episode's number comes in, the episode goes out, until the pipe closes."""
    try:
        worker = Worker(setup)
        connection.send("ready")
        while True:
            connection.send(worker.run_episode(connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the learner has closed the pipe
    except (UserError, EnvFailure) as failure:
        connection.send(failure)
    except Exception:
        connection.send(EnvFailure(f"a worker failed:\n{traceback.format_exc()}"))
