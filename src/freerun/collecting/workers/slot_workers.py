"""Worker processes that write segments into slots of shared memory; only slot numbers travel through their pipes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from struct import Struct
from typing import Protocol

from freerun.collecting.rollouts.rollout import next_from, worker_episode_numbers
from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.workers.process_workers import ProcessHandle, ProcessPlace
from freerun.collecting.workers.worker import Worker, WorkerSetup, reporting
from freerun.collecting.workers.worker_handle import Report, UnitFinished, WorkerReady
from freerun.core import BatchReset, CollectorSettings, EnvFactory, Policy, Segment, State, as_memory_policy
from freerun.transport import processes
from freerun.transport.slots import Slots, bytes_per_step, join

SLOT_BYTES = 128 * 1024
MIN_SLOT_STEPS, MAX_SLOT_STEPS = 16, 1024
MAX_SLOTS_PER_WORKER = 9
MIN_SPARE_ROWS = 8
SEGMENT_SLOTS_PER_WORKER = 3
"""One that is written, one that is read, and one in between."""
ANNOUNCEMENT = Struct("<q")
"""Worker to learner: this slot is written. Any longer message is a pickled exception."""
GRANT = Struct("<qq")
"""Learner to worker: a unit that it may start, and a slot that is free again. Either may be missing."""
MISSING = -1
"""In a message: no unit, or no slot. Announced in place of a slot, it says that the worker is ready."""

SharedIntegers = ctypes.Array[ctypes.c_longlong]


class SlotTask(Protocol):
    """What a worker plays, and how it is granted to it."""

    def play(self, worker: Worker, inbox: GrantInbox) -> None: ...


class EpisodeTask:
    """Whole episodes by number, in as many environments at once as the worker has."""

    def play(self, worker: Worker, inbox: GrantInbox) -> None:
        for segment in worker.rollout.episodes(inbox.next_unit):
            inbox.hand_over(int(segment.episode[0, 0]), segment)


@dataclass(frozen=True)
class SegmentTask:
    """Segments of all of the worker's environments, each of which continues the last one."""

    segment_steps: SharedIntegers
    """The steps of segments that begin from now on, in its only element."""
    begun: SharedIntegers
    """By worker: the last episode that it has begun. The learner reads this when the worker has died."""

    def play(self, worker: Worker, inbox: GrantInbox) -> None:
        next_episode = next_from(worker_episode_numbers(self.begun, worker.index, len(self.begun)))
        segments = worker.rollout.segments(lambda: self.segment_steps[0], next_episode)
        while (unit := inbox.next_unit(wait=True)) is not None:
            inbox.hand_over(unit, next(segments))


class SlotHandle(ProcessHandle):
    """A worker process that writes into its own slots."""

    def __init__(self, index: int, process: ForkServerProcess, connection: Connection, place: SlotProcesses):
        super().__init__(index, process, connection, place)
        self._slot_place = place
        self.num_envs = place.envs_per_worker
        self._parts: dict[int, list[Segment]] = {}  # by unit: the parts so far of one that is longer than a slot
        self._free_slots: list[int] = []  # slots that were read, which the worker does not know yet

    def grant(self, unit: int) -> None:
        self._send(unit)

    def flush(self) -> None:
        while self._free_slots:
            self._send(MISSING)

    def _send(self, unit: int) -> None:
        """Send a unit and a free slot in one message, because waking up is what costs a worker most."""
        slot = self._free_slots.pop() if self._free_slots else MISSING
        # The end-of-file of a worker that has died is on its way to `wait`.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(GRANT.pack(unit, slot))

    def read(self, message: bytes) -> Report | None:
        if len(message) != ANNOUNCEMENT.size:
            raise pickle.loads(message)
        (slot,) = ANNOUNCEMENT.unpack(message)
        if slot == MISSING:
            return WorkerReady(self)
        part = self._slot_place.slots.read(slot)
        self._free_slots.append(slot)
        if part.is_last and part.unit not in self._parts:
            return UnitFinished(self, part.unit, part.segment)
        self._parts.setdefault(part.unit, []).append(part.segment)
        if not part.is_last:
            self.flush()  # the worker needs the slot for the rest of the unit
            return None
        return UnitFinished(self, part.unit, join(self._parts.pop(part.unit)))

    def last_begun_episode(self) -> int | None:
        return self._slot_place.last_begun_episode(self.index)


class SlotProcesses(ProcessPlace[SlotHandle]):
    """Processes with slots of shared memory, granted to them one by one."""

    def __init__(
        self, setup: WorkerSetup, slots: Slots, slots_per_worker: int, task: SlotTask, pin_workers: bool = False
    ):
        super().__init__(setup)
        self.slots = slots
        self._slots_per_worker = slots_per_worker
        self._task = task
        self._pin_workers = pin_workers

    @classmethod
    def for_episodes(
        cls,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        envs_per_worker: int,
        max_envs_per_worker: int,
        pin_workers: bool,
    ) -> SlotProcesses:
        """Make workers that play whole episodes. One that is longer than a slot is handed over in parts."""
        # A slot for each environment, and one to write while the others wait to be read.
        slots_per_worker = min(1 + max_envs_per_worker, MAX_SLOTS_PER_WORKER)
        slot_steps = min(MAX_SLOT_STEPS, max(MIN_SLOT_STEPS, SLOT_BYTES // bytes_per_step(1, factory.spec)))
        num_slots = settings.max_workers * slots_per_worker
        slots = Slots(processes.context(), num_slots, slot_steps, 1, factory.spec)
        setup = WorkerSetup.pack(factory, policy, settings, envs_per_worker)
        return cls(setup, slots, slots_per_worker, EpisodeTask(), pin_workers)

    @property
    def envs_per_worker(self) -> int:
        return self._setup.num_envs

    @envs_per_worker.setter
    def envs_per_worker(self, envs_per_worker: int) -> None:
        """Start workers with another number of environments from now on; the others are outdated."""
        self._setup = replace(self._setup, num_envs=envs_per_worker)
        for handle in list(self._handles):
            handle.is_outdated = handle.num_envs != envs_per_worker

    def last_begun_episode(self, index: int) -> int | None:
        return None

    def launch(self, index: int, connection: Connection) -> ForkServerProcess:
        # A successor gets the slots of its predecessor, all of them free: whatever that had announced was read before
        # the end-of-file that reported its death, and what it had half written is overwritten.
        slots = range(index * self._slots_per_worker, (index + 1) * self._slots_per_worker)
        return processes.start(
            _play, connection, self._setup, self._task, self.slots, list(slots), index, self._pin_workers
        )

    def make_handle(self, index: int, process: ForkServerProcess, connection: Connection) -> SlotHandle:
        return SlotHandle(index, process, connection, self)


class SegmentSlotProcesses(SlotProcesses):
    """Processes that play segments: each continues its own environments."""

    def __init__(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        envs_per_worker: int,
        segment_steps: int,
        accounting: EpisodeAccounting,
        pin_workers: bool = False,
    ):
        context, max_workers = processes.context(), settings.max_workers
        num_slots = max_workers * SEGMENT_SLOTS_PER_WORKER
        remembering = as_memory_policy(policy)
        memory_size = 0 if remembering is None else remembering.memory_size
        # Rows that are no steps come on top. A segment that has more of them is handed over in two parts.
        rests = envs_per_worker > 1 and factory.spec.batch_reset is BatchReset.NEXT_STEP
        slot_rows = segment_steps + (max(MIN_SPARE_ROWS, segment_steps // 8) if rests else 0)
        slots = Slots(context, num_slots, slot_rows, envs_per_worker, factory.spec, memory_size)
        task = SegmentTask(context.RawArray("q", [segment_steps]), context.RawArray("q", max_workers))
        setup = WorkerSetup.pack(factory, policy, settings, envs_per_worker)
        super().__init__(setup, slots, SEGMENT_SLOTS_PER_WORKER, task, pin_workers)
        self._segments = task
        self._accounting = accounting

    @property
    def segment_steps(self) -> int:
        return self._segments.segment_steps[0]

    @segment_steps.setter
    def segment_steps(self, segment_steps: int) -> None:
        # One aligned word of 64 bits, which is stored in one piece: a worker reads the old length or the new one.
        self._segments.segment_steps[0] = segment_steps

    def launch(self, index: int, connection: Connection) -> ForkServerProcess:
        self._segments.begun[index] = self._accounting.next_episode(index) - len(self._segments.begun)
        return super().launch(index, connection)

    def last_begun_episode(self, index: int) -> int | None:
        return self._segments.begun[index]


# ---------------------------------------------------------------------------------------------- in the workers


def _play(
    connection: Connection,
    setup: WorkerSetup,
    task: SlotTask,
    slots: Slots,
    free_slots: list[int],
    index: int,
    pin_worker: bool,
) -> None:
    with reporting(lambda failure: connection.send_bytes(pickle.dumps(failure))):
        if pin_worker:
            cores = processes.usable_cores()
            os.sched_setaffinity(0, {cores[index % len(cores)]})
        worker = Worker(setup, index)
        inbox = GrantInbox(connection, worker, slots, free_slots)
        connection.send_bytes(ANNOUNCEMENT.pack(MISSING))
        task.play(worker, inbox)


class GrantInbox:
    """Holds what the learner has granted to a worker: units to play and slots to write."""

    def __init__(self, connection: Connection, worker: Worker, slots: Slots, free_slots: list[int]):
        self._connection = connection
        self._worker = worker
        self._slots = slots
        self._free_slots = deque(free_slots)
        self._units: deque[int] = deque()

    def next_unit(self, wait: bool) -> int | None:
        """Return a unit that may start now, and load the newest weights for it."""
        if not self._units and wait:
            self._worker.enter(State.WAITING_FOR_WEIGHTS)
        while not self._units and (wait or self._connection.poll()):
            self._receive()
        if not self._units:
            return None
        self._worker.enter(State.BUSY)
        self._worker.refresh()
        return self._units.popleft()

    def hand_over(self, unit: int, segment: Segment) -> None:
        """Write a segment into as many slots as it needs, and announce each when it is written.

        The pipe orders memory: what was written before the announcement is visible to whoever has received it.
        """
        start, is_last = 0, False
        while not is_last:
            if not self._free_slots:
                self._worker.enter(State.WAITING_FOR_SLOT)
            while not self._free_slots:
                self._receive()
            slot = self._free_slots.popleft()
            is_last = self._slots.write(slot, unit, segment, start)
            self._connection.send_bytes(ANNOUNCEMENT.pack(slot))
            start += self._slots.num_steps

    def _receive(self) -> None:
        unit, slot = GRANT.unpack(self._connection.recv_bytes())
        if unit != MISSING:
            self._units.append(unit)
        if slot != MISSING:
            self._free_slots.append(slot)
