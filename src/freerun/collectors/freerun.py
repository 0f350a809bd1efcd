"""`freerun`: persistent workers write segments into shared memory; slot numbers travel through pipes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any

from freerun.collectors.crew import Crew, Peer
from freerun.collectors.rollout import in_order
from freerun.collectors.rounds import Rounds
from freerun.collectors.worker import Worker, WorkerSetup, reporting
from freerun.core import CollectorSettings, Counts, Demand, EnvFactory, Policy, Segment, UserError
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
class FreerunConfig:
    """Mode `freerun`: how its workers collect."""

    envs_per_worker: int = 1
    """Environments that a worker steps in turn, with one call of the policy for all: for environments that are fast."""
    segment_steps: int | None = None
    """Hand over so many steps of all of a worker's environments at a time (whole episodes if not given)."""
    pin_workers: bool = False
    """Keep each worker on one core."""

    def __post_init__(self) -> None:
        for name in ("envs_per_worker", "segment_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")

    def check(self, demand: Demand) -> None:
        """Whether an algorithm that demands this can be served."""
        if demand.episodes and self.segment_steps is not None:
            raise UserError("--episodes-per-update needs whole episodes: leave --segment-steps out")


class Freerun(Crew):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: FreerunConfig):
        context = processes.context()
        num_workers, num_envs = settings.num_workers, config.envs_per_worker
        self._config = config
        if config.segment_steps is None:
            rounds = Rounds(settings.max_lag)
            slots_per_worker = min(1 + num_envs, MOST_SLOTS_PER_WORKER)
            slot_steps = min(1024, max(16, SLOT_BYTES // bytes_per_step(1, factory.spec)))
            self._slots = Slots(context, num_workers * slots_per_worker, slot_steps, 1, factory.spec)
        else:
            if settings.deterministic:
                raise UserError(
                    "--deterministic compares whole episodes, which segments cut into pieces: leave --segment-steps out"
                )
            rounds = Rounds(settings.max_lag, unit_steps=config.segment_steps * num_envs)
            slots_per_worker = 3
            self._slots = Slots(context, num_workers * slots_per_worker, config.segment_steps, num_envs, factory.spec)
        self._slots_per_worker = slots_per_worker
        self._cut = CutEpisodes(num_workers)
        board = WeightsBoard(context, policy.weights.size)
        # An episode fills one of a worker's environments, a segment all of them.
        in_segments = config.segment_steps is not None
        super().__init__(num_workers, rounds, board, 1 if in_segments else num_envs, tied_units=in_segments)
        self._setup = WorkerSetup.pack(factory, policy, board, settings.seed, num_envs)
        self._start()

    def counts(self) -> Counts:
        counts = super().counts()
        return counts if self._config.segment_steps is None else self._cut.correct(counts)

    def collect(self, demand: Demand) -> list[Segment]:
        if self._config.segment_steps is None:
            return super().collect(demand)
        self._config.check(demand)
        segments = super().collect(demand)
        self._cut.taken(segments)
        return segments

    def _target(self, index: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = range(index * self._slots_per_worker, (index + 1) * self._slots_per_worker)
        first_episode = self._cut.next_episode(index)
        return _work, (self._setup, self._config, self._slots, list(slots), index, self.num_workers, first_episode)

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
        segment = join(peer.parts.pop(part.unit))
        self._cut.heard(peer.index, segment)
        return part.unit, segment

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

    def _replace(self, peer: Peer) -> None:
        if self._config.segment_steps is not None:
            self._cut.died(peer.index)
        super()._replace(peer)


class CutEpisodes:
    """The books of episodes that are handed over in pieces.

    Worker w plays episodes w, w + W, w + 2W, …, each in whichever of its environments is free. A worker that replaces
    a dead one goes on after the last episode that was heard of; those that were open stay cut where they were.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._heard = [index - num_workers for index in range(num_workers)]
        self._taken = list(self._heard)
        self._open = [0] * num_workers
        self._cut = 0

    def next_episode(self, worker: int) -> int:
        return self._heard[worker] + self._num_workers

    def heard(self, worker: int, segment: Segment) -> None:
        self._heard[worker] = max(self._heard[worker], int(segment.episode.max()))
        self._open[worker] = int((~segment.ended[-1]).sum())

    def died(self, worker: int) -> None:
        self._cut += self._open[worker]
        self._open[worker] = 0

    def taken(self, segments: list[Segment]) -> None:
        for segment in segments:
            last = int(segment.episode.max())
            worker = last % self._num_workers
            self._taken[worker] = max(self._taken[worker], last)

    def correct(self, counts: Counts) -> Counts:
        """An episode counts as started when a part of it is handed to the learner: then the ledger knows it."""
        started = sum(last // self._num_workers + 1 for last in self._taken)
        return replace(counts, episodes_started=started, episodes_in_flight=0, episodes_rerun=0, episodes_cut=self._cut)


# ---------------------------------------------------------------------------------------------- in the workers


def _work(
    connection: Connection,
    setup: WorkerSetup,
    config: FreerunConfig,
    slots: Slots,
    free_slots: list[int],
    index: int,
    num_workers: int,
    first_episode: int,
) -> None:
    with reporting(lambda failure: connection.send_bytes(pickle.dumps(failure))):
        if config.pin_workers:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[index % len(cores)]})
        worker = Worker(setup)
        desk = _Desk(connection, worker, slots, free_slots)
        connection.send_bytes(ANNOUNCEMENT.pack(NOTHING))
        if config.segment_steps is None:
            for segment in worker.rollout.episodes(desk.next_unit):
                desk.hand_over(int(segment.episode[0, 0]), segment)
        else:
            segments = worker.rollout.segments(
                config.segment_steps, in_order(itertools.count(first_episode, num_workers))
            )
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
        while not self._units and (wait or self._connection.poll()):
            self._listen()
        if not self._units:
            return None
        self._worker.refresh()
        return self._units.popleft()

    def hand_over(self, unit: int, segment: Segment) -> None:
        start, is_last = 0, False
        while not is_last:
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
