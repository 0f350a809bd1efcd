"""Slots: places in shared memory for segments. A worker writes one and sends its number; then the learner reads it."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

import numpy as np
from numpy.typing import NDArray

from freerun.core import OPTIONAL_ARRAYS, SEGMENT_ARRAYS, Array, BatchReset, EnvSpec, Segment
from freerun.transport.stacked_frames import read_stacks, stack_shapes, write_stacks

ALIGNMENT = 64
"""Bytes of a cache line. Each array begins on one of its own."""
UNWRITTEN = -1
POISON = False
"""Fill free slots with nonsense (NaN, −1, True), so that a read of unwritten memory shows. Tests set this."""


@dataclass(frozen=True)
class SlotPart:
    """The content of a slot: a segment, or a part of a segment that is longer than a slot."""

    unit: int
    """The number of the unit of work that the worker was granted."""
    is_last: bool
    segment: Segment


class _Slot:
    """Views of one slot's memory: a header of 64 bytes, then one array after another."""

    def __init__(self, memory: NDArray[np.uint8], num_steps: int, num_envs: int, spec: EnvSpec, memory_size: int):
        shapes = _shapes(num_steps, num_envs, spec)
        self.memory = memory
        self.header = memory[: 3 * 8].view(np.int64)  # number of steps, unit, is_last
        self.seconds = memory[3 * 8 : 4 * 8].view(np.float64)
        self.arrays: dict[str, Array] = {}
        start = ALIGNMENT
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self.arrays[name] = memory[start : start + size].view(dtype).reshape(shape)
            start += _aligned(size)
        end = start + _memory_bytes(num_envs, memory_size)
        self.policy_memory = memory[start:end].view(np.float32).reshape(num_envs, memory_size)


class Slots:
    """A fixed number of slots. A worker writes the slot that it was granted; the learner reads it once it is announced.

    There is no lock. The pipe that carries the slot's number orders the two, on ARM as on x86: sending and receiving
    are system calls in which the kernel locks the pipe, so the receiver sees everything that the sender stored before.
    A worker that is killed while it writes has announced nothing, so a half-written slot is never read.

    The memory has no name: multiprocessing's heap unlinks its file as soon as it is mapped. So a kill leaves nothing.
    """

    def __init__(
        self,
        context: ForkServerContext,
        num_slots: int,
        num_steps: int,
        num_envs: int,
        spec: EnvSpec,
        memory_size: int = 0,
    ):
        """`memory_size` is that of a `MemoryPolicy`; 0 where segments have no memory."""
        self.num_steps = num_steps
        self._shape = (num_slots, num_steps, num_envs)
        self._memory_size = memory_size
        self._spec = spec
        self._slot_bytes = ALIGNMENT + sum(
            _aligned(int(np.prod(shape)) * dtype.itemsize)
            for shape, dtype in _shapes(num_steps, num_envs, spec).values()
        )
        self._slot_bytes += _aligned(_memory_bytes(num_envs, memory_size))
        self._memory = context.RawArray("b", num_slots * self._slot_bytes)
        self._map()
        for slot in self._slots:
            self._free(slot)

    def _map(self) -> None:
        """Make numpy views of the shared memory. Views cannot travel to another process, so each makes its own."""
        num_slots, num_steps, num_envs = self._shape
        rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_slots, self._slot_bytes)
        self._slots = [_Slot(row, num_steps, num_envs, self._spec, self._memory_size) for row in rows]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def write(self, number: int, unit: int, segment: Segment, start: int = 0) -> bool:
        """Write the steps from `start` on, as many as the slot holds. Returns True if they were the segment's last."""
        slot = self._slots[number]
        stop = min(start + self.num_steps, len(segment.reward))
        for name, array in slot.arrays.items():
            if name in SEGMENT_ARRAYS + OPTIONAL_ARRAYS:
                values = getattr(segment, name)
                # Segments without rows that are no steps do not have the array that marks them.
                array[: stop - start] = False if values is None else values[start:stop]
        if self._spec.num_frames > 1:
            here = slice(start, stop)
            write_stacks(slot.arrays, segment.obs[here], segment.next_obs[here], segment.ended[here])
        is_last = stop == len(segment.reward)
        if self._memory_size:
            slot.policy_memory[:] = 0 if segment.memory is None else segment.memory
        # These stores may reach memory in any order: the learner looks only after the slot was announced.
        slot.seconds[0] = segment.seconds
        slot.header[:] = stop - start, unit, is_last
        return is_last

    def read(self, number: int) -> SlotPart:
        """A copy of the content of a slot that was announced. The slot is free afterwards."""
        slot = self._slots[number]
        num_steps, unit, is_last = slot.header.tolist()
        if not 0 < num_steps <= self.num_steps:  # a defect in freerun: it must not be trained on
            raise RuntimeError(f"slot {number} was announced but never written")
        names = SEGMENT_ARRAYS + OPTIONAL_ARRAYS
        arrays = {name: array[:num_steps].copy() for name, array in slot.arrays.items() if name in names}
        if self._spec.num_frames > 1:
            ended = arrays["terminated"] | arrays["truncated"]
            arrays["obs"], arrays["next_obs"] = read_stacks(slot.arrays, ended)
        memory = slot.policy_memory.copy() if self._memory_size else None
        part = SlotPart(unit, bool(is_last), Segment(**arrays, seconds=float(slot.seconds[0]), memory=memory))
        self._free(slot)
        return part

    def _free(self, slot: _Slot) -> None:
        """Mark a slot as unwritten, so that a slot which is announced twice is noticed."""
        if POISON:
            slot.memory[:] = 255
        slot.header[0] = UNWRITTEN


def join(parts: list[Segment]) -> Segment:
    """Put the parts of one long segment together again, in order."""
    if len(parts) == 1:
        return parts[0]
    names = SEGMENT_ARRAYS if parts[0].resting is None else (*SEGMENT_ARRAYS, "resting")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Segment(**arrays, seconds=parts[-1].seconds, memory=parts[0].memory)


def bytes_per_step(num_envs: int, spec: EnvSpec) -> int:
    """The memory that one step of all of a worker's environments takes in a slot."""

    def needed(num_steps: int) -> int:
        shapes = _shapes(num_steps, num_envs, spec).values()
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)

    return needed(2) - needed(1)  # a slot may also hold something that does not grow with its steps


def _shapes(num_steps: int, num_envs: int, spec: EnvSpec) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    here = (num_steps, num_envs)
    obs, action = spec.observation_space, spec.action_space
    flag, number, real = np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float32)
    if spec.num_frames > 1:
        observations = stack_shapes(num_steps, num_envs, obs)
    else:
        observations = {name: ((*here, *obs.shape), np.dtype(obs.dtype)) for name in ("obs", "next_obs")}
    shapes = {
        **observations,
        "action": ((*here, *spec.action_shape), np.dtype(action.dtype)),
        "log_prob": (here, real),
        "reward": (here, real),
        "terminated": (here, flag),
        "truncated": (here, flag),
        "version": (here, number),
        "episode": (here, number),
    }
    return {**shapes, "resting": (here, flag)} if spec.batch_reset is BatchReset.NEXT_STEP else shapes


def _memory_bytes(num_envs: int, memory_size: int) -> int:
    return num_envs * memory_size * np.dtype(np.float32).itemsize


def _aligned(size: int) -> int:
    """The size rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT
