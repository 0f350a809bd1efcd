"""Worker processes with a pipe each, fed and heard by a thread of its own while the learner updates."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

from freerun.collectors.rounds import Rounds
from freerun.core import Counts, Demand, EnvFailure, FloatArray, Segment
from freerun.transport import processes
from freerun.transport.channel import Hub
from freerun.transport.weights import WeightsBoard

Result = TypeVar("Result")

SHORT_UNIT_SECONDS = 0.05
UNITS_AHEAD = 4
"""Short units are dealt out ahead so that a worker need not wait for its next number; long ones one by one."""
SWITCH_SECONDS = 0.0001
"""How long the pump waits for the interpreter while the learner updates: several times for every unit, and a worker
waits with it. Python's own 5 ms would add up."""
MAX_DEATHS_IN_A_ROW = 3
CLOSE_SECONDS = 1.0


@dataclass(eq=False)
class Peer:
    """A worker as the learner sees it."""

    index: int
    process: ForkServerProcess
    connection: Connection
    room: int
    """Units that it may hold at once."""
    ready: bool = False
    units: list[int] = field(default_factory=list)
    """Granted to it and not back yet."""
    owed: list[int] = field(default_factory=list)
    """Lost with the worker that it replaces, and for nobody else to run."""
    parts: dict[int, list[Segment]] = field(default_factory=dict)
    """Pieces of units that are longer than a slot."""
    returned: list[int] = field(default_factory=list)
    """Slots that were read, and that the worker does not know of yet."""


class Crew:
    """What `pipes` and `freerun` have in common; they differ in what travels through the pipe.

    A unit is what is granted and handed over by number: an episode, which any worker may run, or a segment, which is
    tied to its worker because it continues the last one.
    """

    def __init__(
        self,
        num_workers: int,
        rounds: Rounds,
        board: WeightsBoard,
        lanes_per_worker: int = 1,
        tied_units: bool = False,
    ):
        self.num_workers = num_workers
        self._rounds = rounds
        self._board = board
        self._lanes_per_worker = lanes_per_worker
        self._tied_units = tied_units
        self._hub: Hub[Peer] = Hub()
        self._peers: list[Peer] = []
        self._deaths_in_a_row = 0
        self._changed = threading.Condition()  # guards the rounds and the failure
        self._failure: Exception | None = None
        self._closing = False
        self._pump = threading.Thread(target=self._serve, name="freerun-crew", daemon=True)
        self._switch_interval = sys.getswitchinterval()

    def _start(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            for index in range(self.num_workers):
                self._start_worker(index)
            self._pump.start()
            self._wait_for(lambda: all(peer.ready for peer in self._peers) or None)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------ what modes define

    def _target(self, index: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What a worker runs, and the arguments after its end of the pipe."""
        raise NotImplementedError

    def _receive(self, peer: Peer, message: bytes) -> tuple[int, Segment] | None:
        """A finished unit, if the message completes one."""
        raise NotImplementedError

    def _grant(self, peer: Peer, unit: int) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ the learner's thread

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
                    self._deal()
                    self._changed.notify_all()
        except Exception as failure:  # reaches the user through `collect`
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _hear(self, peer: Peer) -> None:
        try:
            message = peer.connection.recv_bytes()
            finished = self._receive(peer, message)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._replace(peer)
            return
        if finished is None:
            return
        unit, segment = finished
        with self._changed:
            self._rounds.finish(unit, segment)
            peer.units.remove(unit)
            peer.room = self._room(segment.seconds)
            self._deaths_in_a_row = 0

    def _room(self, unit_seconds: float) -> int:
        """A unit that is tied to its worker may as well wait there, so that the worker need not wait for it."""
        if self._tied_units:
            return 2
        is_short = unit_seconds < SHORT_UNIT_SECONDS
        return self._lanes_per_worker + (max(UNITS_AHEAD, self._lanes_per_worker // 2) if is_short else 0)

    def _deal(self) -> None:
        """Grant what may start, to those first who hold least: nobody hoards what another could be running."""
        for num_held in range(max(peer.room for peer in self._peers)):
            for peer in self._peers:
                if peer.ready and num_held == len(peer.units) < peer.room:
                    unit = peer.owed.pop(0) if peer.owed else self._rounds.next()
                    if unit is not None:
                        peer.units.append(unit)
                        # A worker that has died is heard of soon enough: its end-of-file is on its way to `_hear`.
                        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                            self._grant(peer, unit)

    def _replace(self, peer: Peer) -> None:
        self._hub.remove(peer.connection)
        peer.connection.close()
        peer.process.join()
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            raise EnvFailure(
                f"{self._deaths_in_a_row} workers died in a row without finishing an episode; "
                f"the last one ended with exit code {peer.process.exitcode}"
            )
        replacement = self._start_worker(peer.index)
        with self._changed:
            self._peers.remove(peer)
            self._rounds.book.worker_restarts += 1
            if self._tied_units:
                replacement.owed = peer.units + peer.owed
            else:
                for unit in peer.units:
                    self._rounds.lost(unit)

    def _start_worker(self, index: int) -> Peer:
        ours, theirs = processes.context().Pipe()
        target, arguments = self._target(index)
        process = processes.start(target, theirs, *arguments)
        theirs.close()
        peer = Peer(index, process, ours, self._lanes_per_worker)
        self._peers.append(peer)
        self._hub.add(ours, peer)
        return peer

    def close(self) -> None:
        sys.setswitchinterval(self._switch_interval)
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
