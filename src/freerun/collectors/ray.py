"""`ray`: Ray actors on any number of machines; whole episodes or segments, taken with `ray.wait` as they finish."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import Counter
from threading import Thread

import cloudpickle
import psutil

from freerun.core import (
    CollectorSettings,
    Demand,
    EnvFactory,
    EnvFailure,
    FloatArray,
    NotFinite,
    OutOfMemory,
    Policy,
    Segment,
    Start,
    State,
    UserError,
    WorkerDied,
)

try:
    import ray
    from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

    from freerun.collectors.ray_cluster import NodeWatch, connect, shortened
    from freerun.collectors.ray_peer import Peer
    from freerun.collectors.ray_spares import Actors
    from freerun.collectors.ray_vitals import Sickbay, end_stopped, tell_every
except ModuleNotFoundError as missing:
    if missing.name not in ("ray", "grpc"):
        raise
    raise UserError("--mode ray needs Ray: pip install 'freerun[ray]'") from None

from freerun.collectors.crew import SHORT_UNIT_SECONDS, Rest
from freerun.collectors.exchange import Exchange
from freerun.collectors.ray_actor import ActorSetup, Hello, Played
from freerun.collectors.ray_config import RayConfig
from freerun.collectors.rounds import Rounds
from freerun.collectors.segments import SegmentRounds
from freerun.transport.deaths import lack_of_memory
from freerun.transport.memory_kills import OutOfMemoryKills

logger = logging.getLogger("freerun")

WAIT_SECONDS = 0.01
"""`ray.wait` cannot be woken: room that the learner has made is dealt out so much later at most."""
MOST_CALLS = 2
"""Of one actor, under way: the second begins when the first returns, without a word from here."""
MOST_UNITS_AHEAD = 64
CLOSE_SECONDS = 1.0
WORD_SECONDS = 60.0
"""Waiting for so long is worth a word. Then a run begins with the workers that are there, if any."""


class RayActors(Exchange):
    """One thread calls the actors and hears them, while the learner updates.

    An actor that dies, with its node or alone, hangs or raises is created again wherever Ray finds room. An actor whose
    result is lost counts as dead: so nothing of it can arrive twice.
    """

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: RayConfig):
        if config.segment_steps is not None and settings.deterministic:
            raise UserError(
                "--deterministic compares whole episodes, which segments cut into pieces: leave --segment-steps out"
            )
        self._config = config
        self._segments: SegmentRounds | None = None
        if config.segment_steps is not None:
            unit_steps = config.segment_steps * config.envs_per_worker
            self._segments = SegmentRounds(settings.num_workers, settings.max_lag, unit_steps, start=settings.start)
        self._rounds = self._segments or Rounds(settings.max_lag, start=settings.start)
        super().__init__(settings, self._rounds, tolerant=False)
        self._sickbay = Sickbay(settings.step_timeout, settings.seed)
        self.weights_seconds = 0.0  # that actors spent on taking weights, all together; read by benchmarks
        self.publish_seconds = 0.0
        self._weights: list[ray.ObjectRef] = []
        self._publication = 0  # unlike versions, these go on from one training to the next
        self._peers: list[Peer] = []
        self._calls: dict[ray.ObjectRef, Peer] = {}
        self._resting: list[Rest] = []
        self._next_word = math.inf
        self._memory = OutOfMemoryKills()
        self._closing = False
        self._pump = Thread(target=self._serve, name="freerun-ray", daemon=True)
        self._connection = connect(config, settings.num_workers)
        try:
            setup = ray.put(
                ActorSetup(
                    cloudpickle.dumps((factory, policy)),
                    settings.seed,
                    config.envs_per_worker,
                    config.segment_steps,
                    settings.num_workers,
                    tell_every(settings.step_timeout),
                    tuple(path for path in sys.path if path),
                )
            )
            is_private = self._connection.is_private
            num_spares = config.num_spares(settings.num_workers, is_private)
            self._actors = Actors(setup, config.cpus_per_worker, num_spares, is_private, settings.step_timeout)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        super()._start()
        self._nodes = NodeWatch()
        for index in range(self.num_workers):
            self._start_actor(index)
        self._pump.start()
        while not self._peers_within(WORD_SECONDS):
            pass

    def _peers_within(self, seconds: float) -> int:
        """How many are ready, once all are or the time is over."""
        deadline = time.monotonic() + seconds
        self._wait_for(lambda: self._num_ready() == self.num_workers or _is_past(deadline) or None)
        if self._num_ready() < self.num_workers:
            logger.warning("%d of %d workers have found a place so far", self._num_ready(), self.num_workers)
        return self._num_ready()

    def _num_ready(self) -> int:
        return sum(peer.hello is not None for peer in self._peers)

    # ------------------------------------------------------------------------------------------ the learner's thread

    def publish(self, weights: FloatArray, version: int) -> None:
        started = time.perf_counter()
        reference = ray.put(weights)
        with self._changed:
            self._weights = [reference]
            self._publication += 1
            self._store.version = version
        self.publish_seconds += time.perf_counter() - started

    def renew(self, start: Start) -> None:
        if self._segments is not None:
            raise RuntimeError("workers that hand over parts of episodes must be started anew")
        with self._changed:
            self._rounds.renew(start)

    def collect(self, demand: Demand) -> list[Segment]:
        self._config.check(demand)
        return super().collect(demand)

    def _room_was_made(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ the pump thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                for reference in self._arrived():
                    if reference in self._calls:  # not of an actor that was given up a moment ago
                        self._hear(reference)
                self._look_at_nodes()
                self._look_for_hung()
                self._memory.look()
                self._start_rested()
                if self._num_ready() == self.num_workers:
                    self._actors.tend()
                self._say_if_nobody_works()
                with self._changed:
                    self._deal()
                    self._changed.notify_all()
        except Exception as failure:  # reaches the user through `collect`
            self._end_with(failure)

    def _arrived(self) -> list[ray.ObjectRef]:
        """Calls that have returned, or failed."""
        if not self._calls:
            with self._changed:
                self._changed.wait(WAIT_SECONDS)
            return []
        ready: list[ray.ObjectRef]
        ready, others = ray.wait(list(self._calls), num_returns=1, timeout=WAIT_SECONDS)
        if ready and others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return ready

    def _hear(self, reference: ray.ObjectRef) -> None:
        peer = self._calls.pop(reference)
        peer.num_calls -= 1
        try:
            reply = ray.get(reference)
        except RayTaskError as error:
            is_rays = isinstance(error.cause, RayError)
            self._replace(peer, self._death(peer, error) if is_rays else EnvFailure(f"a worker failed:\n{error}"))
            return
        except RayError as error:
            self._replace(peer, self._death(peer, error))
            return
        if isinstance(reply, Exception):
            self._replace(peer, reply)
            return
        if isinstance(reply, Hello):
            peer.hello = reply
            self._tracks.enter(peer.index, State.WAITING_FOR_WEIGHTS)
            return
        assert isinstance(reply, Played)
        self.weights_seconds += reply.weights_seconds
        # Its clock is another machine's: what it did ends when it is heard of.
        now = time.perf_counter()
        self._tracks.enter(peer.index, State.BUSY, at=now - reply.seconds)
        self._tracks.enter(peer.index, State.WAITING_FOR_WEIGHTS, at=now)
        for unit, segment in reply.segments.items():
            self._finish(peer.index, unit, segment)
            peer.units.remove(unit)
            peer.room = self._room(segment.seconds)

    def _room(self, unit_seconds: float) -> int:
        """Short units are dealt out ahead, as many as fill two calls; and where lanes take turns, some in any case."""
        num_lanes = self._config.envs_per_worker
        if self._segments is not None:
            return 2
        if num_lanes == 1 and unit_seconds >= SHORT_UNIT_SECONDS:
            return 1
        ahead = math.ceil(num_lanes * SHORT_UNIT_SECONDS / max(unit_seconds, 1e-6))
        return num_lanes + min(MOST_UNITS_AHEAD, max(ahead, num_lanes // 2))

    def _deal(self) -> None:
        """Grant what may start, to those first who hold least: nobody hoards what another could be running."""
        free = [peer for peer in self._peers if peer.hello and not peer.bound_for and peer.num_calls < MOST_CALLS]
        granted: dict[Peer, list[int]] = {}
        for num_held in range(max((peer.room for peer in free), default=0)):
            for peer in free:
                if num_held == len(peer.units) < peer.room:
                    unit = peer.owed.pop(0) if peer.owed else self._store.next()
                    if unit is None:
                        continue
                    peer.units.append(unit)
                    granted.setdefault(peer, []).append(unit)
        for peer, units in granted.items():
            self._call(peer, units)
        for peer in self._peers:
            # Units that it holds need a call to come back with; and one that waits there saves it from waiting.
            if peer.units and (peer.num_calls == 0 or (len(peer.units) > 1 and peer.num_calls < MOST_CALLS)):
                self._call(peer, [])

    def _call(self, peer: Peer, units: list[int]) -> None:
        weights = self._weights if self._publication > peer.publication else []
        peer.publication = self._publication
        self._expect(peer.handle.play.remote(units, self._store.version, weights), peer)

    def _expect(self, reference: ray.ObjectRef, peer: Peer) -> None:
        self._calls[reference] = peer
        peer.num_calls += 1

    # ------------------------------------------------------------------------------------------ actors come and go

    def _start_actor(self, index: int, node: str | None = None) -> Peer:
        first_episode = 0 if self._segments is None else self._segments.parts.next_episode(index)
        key = self._sickbay.new_key()
        handle = self._actors.take(node)
        room = 1 if self._segments is not None else self._config.envs_per_worker
        peer = Peer(index, handle, room, key)
        self._peers.append(peer)
        self._expect(handle.start.remote(first_episode, key), peer)
        return peer

    def _death(self, peer: Peer, error: RayError) -> EnvFailure:
        died = f"worker {peer.index} died: {shortened(error)}"
        if isinstance(error, OutOfMemoryError):
            failure: EnvFailure = OutOfMemory(died)
        else:  # how it ended only its own machine knows
            is_here = self._connection.is_private
            failure = (lack_of_memory(died, self._memory) if is_here else None) or WorkerDied(died)
        failure.from_outside = True  # nobody knows better: its exit code is lost
        return failure

    def _replace(self, peer: Peer, failure: Exception) -> None:
        self._forget(peer)
        self._tracks.enter(peer.index, State.RESTARTING)
        bad = failure.episode if isinstance(failure, NotFinite) else None
        begun = getattr(failure, "begun", None)
        suspects = [begun] if begun in peer.units and self._config.envs_per_worker == 1 else []
        rest_seconds = self._restart_after(peer.index, failure, suspects)
        owed: list[int] = []
        with self._changed:
            if self._segments is not None:
                # An episode in which the environment fails may do so each time: go on after it.
                self._segments.parts.end_worker(peer.index, begun)
                owed = peer.units + peer.owed
            else:
                for unit in peer.units:
                    if unit == bad:
                        self._store.give_up(unit)
                    else:
                        self._store.lost(unit)
        self._resting.append(Rest(time.monotonic() + rest_seconds, peer.index, owed))

    def _look_for_hung(self) -> None:
        if not self._sickbay.is_due():
            return
        states = {peer.index: peer.state for peer in self._peers}
        self._sickbay.look({peer.index: peer.key for peer in self._peers}, states)
        for peer in list(self._peers):
            hung = self._sickbay.judge(peer.index, peer.handle._actor_id.hex())
            if hung is not None:
                self._replace(peer, hung)
        if self._connection.is_private and (
            self._actors.is_late() or any(self._sickbay.is_late(peer.index) for peer in self._peers)
        ):
            end_stopped({peer.hello.pid for peer in self._peers if peer.hello})

    def _forget(self, peer: Peer) -> None:
        """Nothing more is heard of it, whatever it may still do."""
        self._peers.remove(peer)
        self._sickbay.forget(peer.key)
        self._calls = {reference: other for reference, other in self._calls.items() if other is not peer}
        with contextlib.suppress(RayError):
            ray.kill(peer.handle)

    def _start_rested(self) -> None:
        for rest in [rest for rest in self._resting if _is_past(rest.until)]:
            self._resting.remove(rest)
            self._start_actor(rest.index).owed = rest.owed

    def _say_if_nobody_works(self) -> None:
        if self._num_ready():
            self._next_word = time.monotonic() + WORD_SECONDS
        elif _is_past(self._next_word):
            self._next_word = time.monotonic() + WORD_SECONDS
            logger.warning("no worker is left: the run waits for room in the cluster")

    def _look_at_nodes(self) -> None:
        """A node that has joined gets its share of the actors. (Ray itself places those that had found no room.)"""
        if self._connection.is_private or self._segments is not None:
            return
        if self._num_ready() == self.num_workers:
            for node in self._nodes.joined():
                self._send_some_to(node, self.num_workers // len(self._nodes.known))
        for peer in [peer for peer in self._peers if peer.bound_for and not peer.units and not peer.num_calls]:
            self._say_goodbye([peer])
            self._forget(peer)
            self._start_actor(peer.index, peer.bound_for)

    def _send_some_to(self, node: str, share: int) -> None:
        places = {peer: peer.hello.node for peer in self._peers if peer.hello}
        for _ in range(share - list(places.values()).count(node)):
            (crowded, _), *_ = Counter(place for place in places.values() if place != node).most_common(1)
            peer = next(peer for peer, place in places.items() if place == crowded)
            peer.bound_for = places[peer] = node

    # ------------------------------------------------------------------------------------------ the end

    def _say_goodbye(self, peers: list[Peer]) -> None:
        with contextlib.suppress(RayError):
            goodbyes = [peer.handle.close.remote() for peer in peers]
            if goodbyes:
                ray.wait(goodbyes, num_returns=len(goodbyes), timeout=CLOSE_SECONDS)

    def close(self) -> None:
        super().close()
        self._closing = True
        if self._pump.is_alive():
            self._pump.join()
        peers = list(self._peers)
        if ray.is_initialized():
            if hasattr(self, "_actors"):
                self._actors.close()
            self._say_goodbye(peers)
            for peer in peers:
                self._forget(peer)
            here = ray.get_runtime_context().get_node_id()
            _wait_for_end([peer.hello.pid for peer in peers if peer.hello and peer.hello.node == here])
        self._connection.close()


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def _wait_for_end(pids: list[int]) -> None:
    """Ray kills a process some time after it was asked to."""
    deadline = time.monotonic() + CLOSE_SECONDS
    while any(psutil.pid_exists(pid) for pid in pids) and not _is_past(deadline):
        time.sleep(0.005)
