"""Worker processes with a pipe each, fed and heard by a thread of its own while the learner updates."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from freerun.collectors.exchange import Exchange, Store
from freerun.collectors.rounds import Rounds
from freerun.collectors.supervision import Watch
from freerun.collectors.worker import Monitor
from freerun.core import CollectorSettings, Dial, EnvFailure, FloatArray, NotFinite, Segment, Start, State, UserError
from freerun.transport import processes
from freerun.transport.channel import Hub
from freerun.transport.deaths import Coroner
from freerun.transport.weights import WeightsBoard

SHORT_UNIT_SECONDS = 0.05
UNITS_AHEAD = 4
"""Short units are dealt out ahead so that a worker need not wait for its next number; long ones one by one."""
CLOSE_SECONDS = 1.0
ADAPTING_REST_SECONDS = 0.5
"""With --adapt: long enough to undo a change after which workers fail, before the same ones fail again."""
HELD_UP_SECONDS = 0.5
"""A message that takes longer than this to read comes from a worker that stopped in the middle of it."""


@dataclass(eq=False)
class Peer:
    """A worker as the learner sees it."""

    index: int
    process: ForkServerProcess
    connection: Connection
    room: int
    """Units that it may hold at once."""
    lanes: int = 1
    """Environments that it was started with."""
    ready: bool = False
    units: list[int] = field(default_factory=list)
    """Granted to it and not back yet."""
    owed: list[int] = field(default_factory=list)
    """Lost with the worker that it replaces, and for nobody else to run."""
    parts: dict[int, list[Segment]] = field(default_factory=dict)
    """Pieces of units that are longer than a slot."""
    returned: list[int] = field(default_factory=list)
    """Slots that were read, and that the worker does not know of yet."""
    failure: Exception | None = None
    """What it ended with, if it could still say so."""


@dataclass(frozen=True)
class Rest:
    """A worker that failed, before it is started again."""

    until: float
    index: int
    owed: list[int]


class Crew(Exchange):
    """What `pipes` and `freerun` have in common; they differ in what travels through the pipe.

    A unit is what is granted and handed over by number: an episode, which any worker may run, or a segment, which is
    tied to its worker because it continues the last one. A worker that dies, hangs or raises is replaced, and what it
    held is run again; a `tolerant` crew goes on after it instead.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        store: Store,
        board: WeightsBoard,
        monitor: Monitor,
        lanes_per_worker: int = 1,
        tied_units: bool = False,
        tolerant: bool = False,
    ):
        super().__init__(settings, store, tolerant)
        self._board = board
        self._monitor = monitor
        self._coroner = Coroner()
        self._watch = Watch(settings, monitor, self._coroner, self._pids, self._judged_as)
        self._hearing: tuple[Peer, float] | None = None  # whose message is being read, since when
        self._most_workers = settings.most_workers
        self._lanes_per_worker = lanes_per_worker
        self._tied_units = tied_units
        self._hub: Hub[Peer] = Hub()
        self._peers: list[Peer] = []
        self._resting: list[Rest] = []
        self._leaving: list[ForkServerProcess] = []  # had nothing left to do and were let go
        self._closing = False
        self._pump = threading.Thread(target=self._serve, name="freerun-crew", daemon=True)

    def _start(self) -> None:
        super()._start()
        try:
            for index in range(self.num_workers):
                self._start_worker(index)
            self._pump.start()
            self._watch.start()
            self._wait_for(lambda: sum(peer.ready for peer in self._peers) == self.num_workers or None)
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

    def _bury(self, peer: Peer, failure: Exception) -> None:
        """Before a worker that failed is replaced."""

    def _part_with(self, peer: Peer) -> None:
        """After a worker was let go that had nothing left to do."""

    # ------------------------------------------------------------------------------------------ the learner's thread

    def publish(self, weights: FloatArray, version: int) -> None:
        self._board.publish(weights, version)
        with self._changed:
            self._store.version = version

    def renew(self, start: Start) -> None:
        if not isinstance(self._store, Rounds) or self._tied_units:
            raise RuntimeError("workers that hand over parts of episodes must be started anew")
        with self._changed:
            self._store.renew(start)

    def _room_was_made(self) -> None:
        self._hub.wake()

    def dials(self) -> list[Dial]:
        """Workers are started, and let go once they have nothing left to do: nothing is lost with them."""
        if self._most_workers == 1:
            return []
        turn = self._turn_workers
        most = float(self._most_workers)
        return [Dial("num_workers", lambda: self.num_workers, turn, 1.0, most, is_settled=self._is_complete)]

    def _turn_workers(self, value: float) -> None:
        with self._changed:
            self.num_workers = int(value)
        self._hub.wake()

    def _is_complete(self) -> bool:
        """Whether those are there, ready, that should be, and nobody else."""
        peers = list(self._peers)
        return len(peers) == self.num_workers and all(peer.ready and not self._is_surplus(peer) for peer in peers)

    def _is_surplus(self, peer: Peer) -> bool:
        return peer.index >= self.num_workers or peer.lanes != self._lanes_per_worker

    # ------------------------------------------------------------------------------------------ the pump thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                for peer in self._hub.ready(self._seconds_to_rest()):
                    self._hear(peer)
                self._start_rested()
                self._start_or_let_go()
                with self._changed:
                    self._deal()
                    self._try_for_learner()
        except Exception as failure:  # reaches the user through `collect`
            self._end_with(failure)

    def _hear(self, peer: Peer) -> None:
        self._hearing = (peer, time.monotonic())
        try:
            message = peer.connection.recv_bytes()
            finished = self._receive(peer, message)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._hearing = None
            self._replace(peer)
            return
        except (UserError, EnvFailure) as failure:
            peer.failure = failure  # it closes its environments now, and then its end of the pipe
            return
        finally:
            self._hearing = None
        if finished is None:
            return
        unit, segment = finished
        self._finish(peer.index, unit, segment)
        peer.units.remove(unit)
        peer.room = self._room(segment.seconds)

    def _room(self, unit_seconds: float) -> int:
        """A unit that is tied to its worker may as well wait there, so that the worker need not wait for it."""
        if self._tied_units:
            return 2
        is_short = unit_seconds < SHORT_UNIT_SECONDS
        return self._lanes_per_worker + (max(UNITS_AHEAD, self._lanes_per_worker // 2) if is_short else 0)

    def _deal(self) -> None:
        """Grant what may start, to those first who hold least: nobody hoards what another could be running."""
        for num_held in range(max((peer.room for peer in self._peers), default=0)):
            for peer in self._peers:
                if peer.ready and num_held == len(peer.units) < peer.room:
                    if self._is_surplus(peer) and not peer.owed:
                        continue
                    unit = peer.owed.pop(0) if peer.owed else self._store.next()
                    if unit is not None:
                        peer.units.append(unit)
                        # A worker that has died is heard of soon enough: its end-of-file is on its way to `_hear`.
                        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                            self._grant(peer, unit)

    def _replace(self, peer: Peer) -> None:
        self._hub.remove(peer.connection)
        peer.connection.close()
        processes.stop([peer.process], CLOSE_SECONDS)
        self._tracks.enter(peer.index, State.RESTARTING)
        failure = peer.failure or self._coroner.report(peer.index, peer.process.pid, peer.process.exitcode)
        self._bury(peer, failure)
        rest_seconds = self._restart_after(peer.index, failure, self._suspects(peer, failure))
        if self._bounds is not None:
            rest_seconds = max(rest_seconds, ADAPTING_REST_SECONDS)
        given_up = [failure.episode] if isinstance(failure, NotFinite) else []
        with self._changed:
            self._peers.remove(peer)
            for unit in [] if self._tied_units else peer.units:
                if unit in given_up:
                    self._store.give_up(unit)
                else:
                    self._store.lost(unit)
        owed = peer.units + peer.owed if self._tied_units else []
        self._resting.append(Rest(time.monotonic() + rest_seconds, peer.index, owed))

    def _suspects(self, peer: Peer, failure: Exception) -> list[int]:
        """The episodes that it may have failed in, as far as that is known."""
        if isinstance(failure, NotFinite) and failure.episode is not None:
            return [failure.episode]
        episode = self._monitor.pulse.episode(peer.index)
        known = not self._tied_units and self._lanes_per_worker == 1 and episode in peer.units
        return [episode] if known else []

    def _pids(self) -> dict[int, int]:
        return {peer.index: peer.process.pid for peer in list(self._peers) if peer.process.pid is not None}

    def _judged_as(self, worker: int) -> str:
        """Its state, but for one that only waits for a message of another to be read to its end."""
        if self._hearing is not None:
            peer, since = self._hearing
            if peer.index != worker and time.monotonic() - since > HELD_UP_SECONDS:
                return "waiting"
        return self._state_of(worker)

    def _state_of(self, worker: int) -> str:
        for peer in list(self._peers):
            if peer.index == worker:
                return ("busy" if peer.units else "waiting") if peer.ready else "starting"
        return "resting"

    def _seconds_to_rest(self) -> float | None:
        """Until there is something to do that nobody will call for."""
        until = [max(0.0, rest.until - time.monotonic()) for rest in self._resting]
        seconds = self._store.seconds_to_next()
        if seconds is not None and any(map(self._has_room, self._peers)):
            until.append(seconds)  # 0 if the learner has just made room, and those who wait for it are idle
        return min(until, default=None)

    def _has_room(self, peer: Peer) -> bool:
        return peer.ready and len(peer.units) < peer.room and not self._is_surplus(peer)

    def _start_rested(self) -> None:
        for rest in [rest for rest in self._resting if rest.until <= time.monotonic()]:
            self._resting.remove(rest)
            self._start_worker(rest.index).owed = rest.owed

    def _start_or_let_go(self) -> None:
        """As many as there should be. One at a time is started: meanwhile the others want to be heard."""
        if all(process.exitcode is not None for process in self._leaving):
            self._leaving = []
        for peer in [peer for peer in self._peers if self._is_surplus(peer)]:
            if peer.ready and not (peer.units or peer.owed):
                self._let_go(peer)
        there = {peer.index for peer in self._peers} | {rest.index for rest in self._resting}
        missing = [index for index in range(self.num_workers) if index not in there]
        if missing:
            self._start_worker(missing[0])
            if len(missing) > 1:
                self._hub.wake()

    def _let_go(self, peer: Peer) -> None:
        """It ends in silence when its pipe is closed."""
        self._hub.remove(peer.connection)
        with self._changed:
            self._peers.remove(peer)
            self._part_with(peer)
        peer.connection.close()
        self._leaving.append(peer.process)
        self._tracks.enter(peer.index, State.PARKED)

    def _start_worker(self, index: int) -> Peer:
        self._monitor.pulse.clear(index)
        ours, theirs = processes.context().Pipe()
        target, arguments = self._target(index)
        process = processes.start(target, theirs, *arguments)
        theirs.close()
        peer = Peer(index, process, ours, self._lanes_per_worker, self._lanes_per_worker)
        self._peers.append(peer)
        self._hub.add(ours, peer)
        return peer

    def close(self) -> None:
        super().close()
        self._closing = True
        self._watch.close()
        self._hub.wake()
        if self._pump.is_alive():
            self._pump.join(CLOSE_SECONDS)
        if self._pump.is_alive():  # held up by a worker that stopped in the middle of a message
            processes.stop([peer.process for peer in self._peers], grace_seconds=0.0)
            self._pump.join()
        for peer in self._peers:
            peer.connection.close()
        processes.stop([*(peer.process for peer in self._peers), *self._leaving], CLOSE_SECONDS)
        self._hub.close()
        self._monitor.close()
