"""`freerun`: persistent workers write segments into shared memory; slot numbers travel through pipes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any, Protocol

from freerun.collectors.crew import Crew, Peer
from freerun.collectors.exchange import Store
from freerun.collectors.rollout import in_order, noted
from freerun.collectors.rounds import Rounds
from freerun.collectors.segments import Parts, SegmentRounds, segment_dial
from freerun.collectors.supervision import came_from_outside
from freerun.collectors.worker import Monitor, Worker, WorkerSetup, reporting
from freerun.core import (
    CollectorSettings,
    Demand,
    Dial,
    EnvFactory,
    ModeOptions,
    Policy,
    Room,
    Segment,
    State,
    UserError,
    require_positive,
)
from freerun.transport import processes
from freerun.transport.slots import Slots, bytes_per_step, join
from freerun.transport.weights import WeightsBoard

SLOT_BYTES = 128 * 1024
MOST_SLOTS_PER_WORKER = 9
ANNOUNCEMENT = Struct("<q")
"""Worker to learner: this slot is written. (Any longer message is a pickled exception.)"""
GRANT = Struct("<qq")
"""Learner to worker: a unit that it may start, and a slot that is free again; either may be missing."""
NOTHING = -1


@dataclass(frozen=True)
class FreerunConfig(ModeOptions):
    """Mode `freerun`: how its workers collect."""

    envs_per_worker: int = 1
    """Environments that a worker steps in turn, with one call of the policy for all: for environments that are fast."""
    segment_steps: int | None = None
    """Hand over so many steps of all of a worker's environments at a time (whole episodes if not given)."""
    pin_workers: bool = False
    """Keep each worker on one core."""

    def __post_init__(self) -> None:
        require_positive(self, "envs_per_worker", "segment_steps")

    def check(self, demand: Demand) -> None:
        """Whether an algorithm that demands this can be served."""
        if demand.episodes and self.segment_steps is not None:
            raise UserError("--episodes-per-update needs whole episodes: leave --segment-steps out")


class SegmentStore(Store, Protocol):
    """One for segments: `SegmentRounds`, or a `Stream`."""

    parts: Parts


class Freerun(Crew):
    """Given a store, for the modes that hand over segments in another order."""

    def __init__(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        config: FreerunConfig,
        store: SegmentStore | None = None,
        tolerant: bool = False,
    ):
        context = processes.context()
        num_workers, num_envs = settings.most_workers, config.envs_per_worker
        self._config = config
        if config.segment_steps is None:
            most_envs = num_envs if settings.room is None else max(num_envs, settings.room.most_envs_per_worker)
            slots_per_worker = min(1 + most_envs, MOST_SLOTS_PER_WORKER)
            slot_steps = min(1024, max(16, SLOT_BYTES // bytes_per_step(1, factory.spec)))
            self._slots = Slots(context, num_workers * slots_per_worker, slot_steps, 1, factory.spec)
        else:
            if settings.deterministic:
                raise UserError(
                    "--deterministic compares whole episodes, which segments cut into pieces: leave --segment-steps out"
                )
            unit_steps = config.segment_steps * num_envs
            store = store or SegmentRounds(
                num_workers, settings.max_lag, unit_steps, start=settings.start, num_playing=settings.num_workers
            )
            slots_per_worker = 3
            self._slots = Slots(context, num_workers * slots_per_worker, config.segment_steps, num_envs, factory.spec)
        self._slots_per_worker = slots_per_worker
        self._parts = store.parts if store is not None else Parts(num_workers, num_playing=settings.num_workers)
        self._segment_steps = context.RawArray("q", [config.segment_steps or 0])  # of those that are begun from now on
        self._begun = context.RawArray("q", num_workers)  # the last episode that each worker has begun, heard of or not
        board, monitor = WeightsBoard(context, policy.weights.size), Monitor(num_workers)
        # An episode fills one of a worker's environments, a segment all of them.
        in_segments = store is not None
        super().__init__(
            settings,
            store or Rounds(settings.max_lag, start=settings.start),
            board,
            monitor,
            1 if in_segments else num_envs,
            tied_units=in_segments,
            tolerant=tolerant,
        )
        self._setup = WorkerSetup.pack(factory, policy, board, monitor, settings, num_envs)
        self._start()

    def collect(self, demand: Demand) -> list[Segment]:
        self._config.check(demand)
        return super().collect(demand)

    def _target(self, index: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = range(index * self._slots_per_worker, (index + 1) * self._slots_per_worker)
        with self._changed:
            self._begun[index] = self._parts.begin_worker(index) - self._most_workers
        setup = self._setup if self._tied_units else replace(self._setup, num_envs=self._lanes_per_worker)
        return _work, (setup, self._config, self._slots, list(slots), index, self._begun, self._segment_steps)

    def dials(self) -> list[Dial]:
        if self._bounds is None:
            return []
        dials = super().dials()
        if not self._tied_units:
            dials += self._envs_dial(self._bounds)
        else:
            if getattr(self._store, "queue_size", None) is not None:
                dials.append(self._queue_dial(self._store))  # type: ignore[arg-type]
            dials.append(segment_dial(self._segment_steps[0], lambda: self._segment_steps[0], self._turn_segments))
        return dials

    def _envs_dial(self, room: Room) -> list[Dial]:
        """Workers with another number of environments take the place of those that have nothing left to do."""

        def turn(value: float) -> None:
            with self._changed:
                self._lanes_per_worker = int(value)
            self._hub.wake()

        most = max(room.most_envs_per_worker, self._config.envs_per_worker)
        read = lambda: self._lanes_per_worker  # noqa: E731
        return [Dial("envs_per_worker", read, turn, 1.0, most, is_settled=self._is_complete)] if most > 1 else []

    def _turn_segments(self, value: float) -> None:
        with self._changed:
            self._segment_steps[0] = int(value)
            if isinstance(self._store, SegmentRounds):
                self._store.cut(int(value) * self._config.envs_per_worker)

    def _receive(self, peer: Peer, message: bytes) -> tuple[int, Segment] | None:
        if len(message) != ANNOUNCEMENT.size:
            raise pickle.loads(message)
        (slot,) = ANNOUNCEMENT.unpack(message)
        if slot == NOTHING:
            peer.ready = True
            return None
        part = self._slots.read(slot)
        peer.returned.append(slot)
        peer.parts.setdefault(part.unit, []).append(part.segment)
        if not part.is_last:
            return None
        return part.unit, join(peer.parts.pop(part.unit))

    def _grant(self, peer: Peer, unit: int | None) -> None:
        """A unit and a slot in one message: waking up is what costs a worker most."""
        slot = peer.returned.pop() if peer.returned else NOTHING
        peer.connection.send_bytes(GRANT.pack(NOTHING if unit is None else unit, slot))

    def _deal(self) -> None:
        super()._deal()
        for peer in self._peers:
            if peer.returned:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    while peer.returned:
                        self._grant(peer, None)

    def _part_with(self, peer: Peer) -> None:
        """Episodes that it had begun and handed over in part stay cut where they are."""
        if self._tied_units:
            self._parts.retire_worker(peer.index)

    def _bury(self, peer: Peer, failure: Exception) -> None:
        """An episode in which it fails may do so each time: go on after it, unless the cause lay outside."""
        if not self._tied_units:
            return
        with self._changed:
            plays_again = not self._tolerant and came_from_outside(failure)
            self._parts.end_worker(peer.index, None if plays_again else self._begun[peer.index])


# ---------------------------------------------------------------------------------------------- in the workers


def _work(
    connection: Connection,
    setup: WorkerSetup,
    config: FreerunConfig,
    slots: Slots,
    free_slots: list[int],
    index: int,
    begun: ctypes.Array[ctypes.c_longlong],
    segment_steps: ctypes.Array[ctypes.c_longlong],
) -> None:
    with reporting(lambda failure: connection.send_bytes(pickle.dumps(failure))):
        if config.pin_workers:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[index % len(cores)]})
        worker = Worker(setup, index)
        desk = _Desk(connection, worker, slots, free_slots)
        connection.send_bytes(ANNOUNCEMENT.pack(NOTHING))
        if config.segment_steps is None:
            for segment in worker.rollout.episodes(desk.next_unit):
                desk.hand_over(int(segment.episode[0, 0]), segment)
        else:
            next_episode = in_order(noted(begun, index, len(begun)))
            segments = worker.rollout.segments(lambda: segment_steps[0], next_episode)
            while (unit := desk.next_unit(wait=True)) is not None:
                desk.hand_over(unit, next(segments))


class _Desk:
    """Where a worker keeps what the learner has granted it: units to play and slots to write."""

    def __init__(self, connection: Connection, worker: Worker, slots: Slots, free_slots: list[int]):
        self._connection = connection
        self._worker = worker
        self._slots = slots
        self._free = deque(free_slots)
        self._units: deque[int] = deque()

    def next_unit(self, wait: bool) -> int | None:
        """A unit that may start now, with the newest weights."""
        if not self._units and wait:
            self._worker.enter(State.WAITING_FOR_WEIGHTS)
        while not self._units and (wait or self._connection.poll()):
            self._listen()
        if not self._units:
            return None
        self._worker.enter(State.BUSY)
        self._worker.refresh()
        return self._units.popleft()

    def hand_over(self, unit: int, segment: Segment) -> None:
        start, is_last = 0, False
        while not is_last:
            if not self._free:
                self._worker.enter(State.WAITING_FOR_SLOT)
            while not self._free:
                self._listen()
            slot = self._free.popleft()
            is_last = self._slots.write(slot, unit, segment, start)
            self._connection.send_bytes(ANNOUNCEMENT.pack(slot))
            start += self._slots.num_steps

    def _listen(self) -> None:
        unit, slot = GRANT.unpack(self._connection.recv_bytes())
        if unit != NOTHING:
            self._units.append(unit)
        if slot != NOTHING:
            self._free.append(slot)
