"""Slots: places in shared memory for segments. This is their memory; `slot_workers.py` writes and reads segments."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import numpy as np
from numpy.typing import NDArray

from freerun.core import Array, BatchReset, EnvSpec
from freerun.transport.stacked_frames import stack_shapes

ALIGNMENT = 64
"""Bytes of a cache line. Each array begins on one of its own."""
UNWRITTEN = -1
POISON = False
"""Fill free slots with nonsense (NaN, −1, True), so that a read of unwritten memory shows. Tests set this."""


class Slot:
    """Views of one slot's memory: a header of 64 bytes, then one array after another."""

    def __init__(
        self, number: int, memory: NDArray[np.uint8], num_steps: int, num_envs: int, spec: EnvSpec, memory_size: int
    ):
        shapes = _shapes(num_steps, num_envs, spec)
        self.number = number
        self.num_steps = num_steps
        """The number of steps that it has room for."""
        self.has_stacks = spec.num_frames > 1
        """True where observations are stacks of frames, of which each lies here once (`stacked_frames.py`)."""
        self.has_memory = memory_size > 0
        self._memory = memory
        self.header = memory[: 3 * 8].view(np.int64)
        """The number of steps, the number of the unit, and whether they are the unit's last."""
        self.seconds = memory[3 * 8 : 4 * 8].view(np.float64)
        self.arrays: dict[str, Array] = {}
        start = ALIGNMENT
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self.arrays[name] = memory[start : start + size].view(dtype).reshape(shape)
            start += _aligned(size)
        end = start + _memory_bytes(num_envs, memory_size)
        self.policy_memory = memory[start:end].view(np.float32).reshape(num_envs, memory_size)
        """What the policy remembered before the first step; empty where it has no memory."""

    def free(self) -> None:
        """Mark the slot as unwritten, so that a slot which is announced twice is noticed."""
        if POISON:
            self._memory[:] = 255
        self.header[0] = UNWRITTEN


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
            slot.free()

    def _map(self) -> None:
        """Make numpy views of the shared memory. Views cannot travel to another process, so each makes its own."""
        num_slots, num_steps, num_envs = self._shape
        rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_slots, self._slot_bytes)
        self._slots = [
            Slot(number, row, num_steps, num_envs, self._spec, self._memory_size) for number, row in enumerate(rows)
        ]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]


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
