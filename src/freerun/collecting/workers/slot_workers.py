"""Worker processes that hand segments over in slots of shared memory; only slot numbers travel through their pipes.

This file has both ends: `GrantInbox` writes segments in the worker, `SlotProcesses.wait` reads them in the learner's
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np

from freerun.collecting.rollouts.episode_numbers import next_from, worker_episode_numbers
from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.workers.process_workers import ProcessHandle, ProcessPlace
from freerun.collecting.workers.worker import Worker, WorkerSetup, reporting
from freerun.collecting.workers.worker_handle import Report, UnitFinished, WorkerReady
from freerun.core import (
    OPTIONAL_ARRAYS,
    SEGMENT_ARRAYS,
    BatchReset,
    CollectorSettings,
    EnvFactory,
    Policy,
    Segment,
    State,
    as_memory_policy,
)
from freerun.transport import processes
from freerun.transport.slots import Slot, Slots, bytes_per_step
from freerun.transport.stacked_frames import read_stacks, write_stacks

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
"""In a message: no unit, or no slot."""
READY = ANNOUNCEMENT.pack(MISSING)
"""Announced before any slot: the worker has built its environments."""

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

    def read(self, slot: Slot) -> UnitFinished | None:
        """Take a segment out of a slot; None if it is a part of one, and more of it will follow."""
        part = read_slot(slot)
        self._free_slots.append(slot.number)
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

    def wait(self, seconds: float | None) -> Iterator[Report]:
        for handle, message in self.messages(seconds):
            if message is None:
                yield self.lost(handle)
            elif len(message) != ANNOUNCEMENT.size:
                handle.reported_failure = pickle.loads(message)  # it closes its environments, and then its pipe
            elif message == READY:
                yield WorkerReady(handle)
            else:
                (number,) = ANNOUNCEMENT.unpack(message)
                finished = handle.read(self.slots[number])
                if finished is not None:
                    yield finished


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


# ---------------------------------------------------------------------------------------------- a segment in a slot


class SlotPart(NamedTuple):
    """The content of a slot: a segment, or a part of a segment that is longer than a slot."""

    unit: int
    """The number of the unit of work that the worker was granted."""
    is_last: bool
    segment: Segment


def write_slot(slot: Slot, unit: int, segment: Segment, start: int = 0) -> bool:
    """Write the steps from `start` on, as many as the slot holds. Returns True if they were the segment's last."""
    stop = min(start + slot.num_steps, len(segment.reward))
    for name, array in slot.arrays.items():
        if name in SEGMENT_ARRAYS + OPTIONAL_ARRAYS:
            values = getattr(segment, name)
            # Segments without rows that are no steps do not have the array that marks them.
            array[: stop - start] = False if values is None else values[start:stop]
    if slot.has_stacks:
        here = slice(start, stop)
        write_stacks(slot.arrays, segment.obs[here], segment.next_obs[here], segment.ended[here])
    is_last = stop == len(segment.reward)
    if slot.has_memory:
        slot.policy_memory[:] = 0 if segment.memory is None else segment.memory
    # These stores may reach memory in any order: the learner looks only after the slot was announced.
    slot.seconds[0] = segment.seconds
    slot.header[:] = stop - start, unit, is_last
    return is_last


def read_slot(slot: Slot) -> SlotPart:
    """A copy of the content of a slot that was announced. The slot is free afterwards."""
    num_steps, unit, is_last = slot.header.tolist()
    if not 0 < num_steps <= slot.num_steps:  # a defect in freerun: it must not be trained on
        raise RuntimeError(f"slot {slot.number} was announced but never written")
    names = SEGMENT_ARRAYS + OPTIONAL_ARRAYS
    arrays = {name: array[:num_steps].copy() for name, array in slot.arrays.items() if name in names}
    if slot.has_stacks:
        ended = arrays["terminated"] | arrays["truncated"]
        arrays["obs"], arrays["next_obs"] = read_stacks(slot.arrays, ended)
    memory = slot.policy_memory.copy() if slot.has_memory else None
    part = SlotPart(unit, bool(is_last), Segment(**arrays, seconds=float(slot.seconds[0]), memory=memory))
    slot.free()
    return part


def join(parts: list[Segment]) -> Segment:
    """Put the parts of one long segment together again, in order."""
    if len(parts) == 1:
        return parts[0]
    names = SEGMENT_ARRAYS if parts[0].resting is None else (*SEGMENT_ARRAYS, "resting")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Segment(**arrays, seconds=parts[-1].seconds, memory=parts[0].memory)


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
        connection.send_bytes(READY)
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
            is_last = write_slot(self._slots[slot], unit, segment, start)
            self._connection.send_bytes(ANNOUNCEMENT.pack(slot))
            start += self._slots.num_steps

    def _receive(self) -> None:
        unit, slot = GRANT.unpack(self._connection.recv_bytes())
        if unit != MISSING:
            self._units.append(unit)
        if slot != MISSING:
            self._free_slots.append(slot)
