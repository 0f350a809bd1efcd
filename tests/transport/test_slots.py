"""Slots hold what was written, and what was never written cannot be read unnoticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recording_context import RecordingContext

from freerun.collecting.workers.slot_workers import join, read_slot, write_slot
from freerun.core import SEGMENT_ARRAYS, EnvSpec, Segment
from freerun.transport import processes, slots
from freerun.transport.slots import ALIGNMENT, Slots

SPECS = {
    "vector": EnvSpec(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)),
    "image": EnvSpec(spaces.Box(0, 255, (4, 5, 2), np.uint8), spaces.Box(-1, 1, (2,), np.float32)),
    "multidiscrete": EnvSpec(spaces.Box(-1, 1, (1,), np.float32), spaces.MultiDiscrete([3, 2])),
}
NUM_KILLS = 15


def segment(spec: EnvSpec, num_steps: int, num_envs: int, mark: int) -> Segment:
    """Every number is the mark (modulo what the type holds), so that a mixture shows."""
    here = (num_steps, num_envs)
    obs = np.full((*here, *spec.observation_space.shape), mark % 251, spec.observation_space.dtype)
    flags = np.full(here, mark % 2, np.bool_)
    return Segment(
        obs=obs,
        action=np.full((*here, *spec.action_shape), mark % 2, spec.action_space.dtype),
        log_prob=np.full(here, mark, np.float32),
        reward=np.full(here, mark, np.float32),
        terminated=flags,
        truncated=flags,
        next_obs=obs,
        version=np.full(here, mark),
        episode=np.full(here, mark),
        seconds=float(mark),
    )


def assert_same(a: Segment, b: Segment) -> None:
    for name in SEGMENT_ARRAYS:
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.seconds == b.seconds


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_what_is_written_is_read(name: str, num_envs: int) -> None:
    shared = Slots(processes.context(), 3, 8, num_envs, SPECS[name])
    written = [segment(SPECS[name], steps, num_envs, mark) for mark, steps in ((7, 8), (8, 1), (9, 5))]
    for number, content in enumerate(written):
        assert write_slot(shared[number], unit=100 + number, segment=content)
    for number, content in enumerate(written):
        part = read_slot(shared[number])
        assert (part.unit, part.is_last) == (100 + number, True)
        assert_same(part.segment, content)


@pytest.mark.parametrize("num_steps", [8, 9, 16, 17, 40])
def test_a_segment_longer_than_a_slot_travels_in_parts(num_steps: int) -> None:
    spec = SPECS["vector"]
    shared = Slots(processes.context(), 1, 8, 1, spec)
    whole = segment(spec, num_steps, 1, 3)
    whole.reward[:, 0] = np.arange(num_steps)
    parts, start, is_last = [], 0, False
    while not is_last:
        is_last = write_slot(shared[0], 5, whole, start)
        part = read_slot(shared[0])
        assert part.is_last == is_last
        parts.append(part.segment)
        start += shared.num_steps
    assert len(parts) == -(-num_steps // 8)
    assert_same(join(parts), whole)


@pytest.mark.parametrize("num_steps", [8, 20])
def test_the_memory_at_the_start_of_a_segment_goes_along(num_steps: int) -> None:
    spec = SPECS["vector"]
    shared = Slots(processes.context(), 3, 8, 2, spec, memory_size=5)
    whole = segment(spec, num_steps, 2, 3)
    for memory in (np.arange(10, dtype=np.float32).reshape(2, 5), None):
        whole.memory = memory
        starts = range(0, num_steps, 8)
        for number, start in enumerate(starts):
            write_slot(shared[number], 5, whole, start)
        found = join([read_slot(shared[number]).segment for number in range(len(starts))])
        np.testing.assert_array_equal(found.memory, np.zeros((2, 5)) if memory is None else memory)
        assert_same(found, whole)


def test_a_read_of_what_was_never_written_is_an_error() -> None:
    shared = Slots(processes.context(), 2, 8, 1, SPECS["vector"])
    with pytest.raises(RuntimeError, match="slot 1 was announced but never written"):
        read_slot(shared[1])
    write_slot(shared[1], 0, segment(SPECS["vector"], 8, 1, 1))
    read_slot(shared[1])
    with pytest.raises(RuntimeError, match="never written"):
        read_slot(shared[1])


def test_free_slots_are_poisoned() -> None:
    assert slots.POISON
    context = RecordingContext()
    shared = Slots(context, 1, 8, 1, SPECS["vector"])
    memory = np.frombuffer(context.arrays[0], np.uint8)
    write_slot(shared[0], 0, segment(SPECS["vector"], 8, 1, 1))
    write_slot(shared[0], 0, segment(SPECS["vector"], 3, 1, 1))
    assert not (memory == 255).all()
    read_slot(shared[0])
    assert (memory[ALIGNMENT:] == 255).all(), "NaN where a float lies, -1 where an integer does"


class SlotsMachine(RuleBasedStateMachine):
    """Two workers write, announce, die and are replaced in any order; whatever was announced is read whole, once."""

    @initialize(num_slots=strategies.integers(1, 3))
    def start(self, num_slots: int) -> None:
        context = RecordingContext()
        self.slots = Slots(context, 2 * num_slots, 8, 1, SPECS["vector"])
        self.memory = np.frombuffer(context.arrays[0], np.uint8).reshape(2 * num_slots, -1)  # a row for each slot
        self.free = [list(range(worker * num_slots, (worker + 1) * num_slots)) for worker in range(2)]
        self.all_slots = [list(slots) for slots in self.free]
        self.announced: list[list[tuple[int, int, int, bool]]] = [[], []]  # slot, mark, steps, whether the last part
        self.mark = 0

    @rule(worker=strategies.integers(0, 1), num_steps=strategies.integers(1, 20))
    def hand_over(self, worker: int, num_steps: int) -> None:
        """Write as many parts as there are free slots. The rest is lost, as with a worker that dies."""
        self.mark += 1
        content, begin, is_last = segment(SPECS["vector"], num_steps, 1, self.mark), 0, False
        while not is_last and self.free[worker]:
            slot = self.free[worker].pop()
            is_last = write_slot(self.slots[slot], self.mark, content, begin)
            self.announced[worker].append((slot, self.mark, min(8, num_steps - begin), is_last))
            begin += 8

    @rule(worker=strategies.integers(0, 1), in_the_middle=strategies.booleans())
    def die(self, worker: int, in_the_middle: bool) -> None:
        """A worker dies, perhaps while it writes. What was announced is read; its successor overwrites the rest."""
        if in_the_middle and self.free[worker]:
            self.memory[self.free[worker][-1], ALIGNMENT : 2 * ALIGNMENT] = 77  # some of the first array, no header
        while self.announced[worker]:
            self.read(worker)
        self.free[worker] = list(self.all_slots[worker])

    @rule(worker=strategies.integers(0, 1))
    def read(self, worker: int) -> None:
        if not self.announced[worker]:
            return
        slot, mark, num_steps, is_last = self.announced[worker].pop(0)
        part = read_slot(self.slots[slot])
        assert (part.unit, part.is_last) == (mark, is_last)
        assert_same(part.segment, segment(SPECS["vector"], num_steps, 1, mark))
        self.free[worker].append(slot)

    @invariant()
    def no_slot_is_lost_or_has_two_owners(self) -> None:
        for worker in range(2) if hasattr(self, "slots") else ():
            held = self.free[worker] + [slot for slot, *_ in self.announced[worker]]
            assert sorted(held) == self.all_slots[worker]


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _write_for_ever(connection: Connection, shared: Slots, first_mark: int) -> None:
    """Announces slots as they are written, and takes them back as the reader returns them."""
    processes.enter_worker()
    free = [0, 1]
    mark = first_mark
    while True:
        while not free:
            free.append(connection.recv())
        slot = free.pop()
        write_slot(shared[slot], mark, segment(SPECS["vector"], 200, 4, mark))
        connection.send(slot)
        mark += 1


def _announced(connection: Connection) -> Iterator[int]:
    try:
        while connection.poll(5):
            yield connection.recv()
    except (EOFError, ConnectionResetError):
        return


def test_a_writer_killed_at_any_instruction_loses_only_what_it_had_not_announced() -> None:
    """The writer is killed again and again at random moments. Every slot that was announced is whole and in order."""
    rng = np.random.default_rng(0)
    context = processes.context()
    shared = Slots(context, 2, 200, 4, SPECS["vector"])
    num_read = 0
    for kill in range(NUM_KILLS):
        ours, theirs = context.Pipe()
        process = processes.start(_write_for_ever, theirs, shared, 1000 * kill)
        theirs.close()
        deadline = None
        marks = []
        for slot in _announced(ours):
            if deadline is None:
                deadline = time.perf_counter() + float(rng.uniform(0, 0.01))
            part = read_slot(shared[slot])
            marks.append(part.unit)
            assert_same(part.segment, segment(SPECS["vector"], 200, 4, part.unit))
            if time.perf_counter() > deadline and process.exitcode is None:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            try:
                ours.send(slot)
            except (BrokenPipeError, ConnectionResetError):
                continue
        assert marks == list(range(1000 * kill, 1000 * kill + len(marks)))
        num_read += len(marks)
        process.join()
        ours.close()
    assert num_read > NUM_KILLS
