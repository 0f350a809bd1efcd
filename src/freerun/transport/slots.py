"""Slots: room in shared memory for segments. Workers write, announce a slot's number, and the learner reads."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

import numpy as np
from numpy.typing import NDArray

from freerun.core import SEGMENT_ARRAYS, Array, EnvSpec, Segment

ALIGNMENT = 64
UNWRITTEN = -1
POISON = False
"""Fill free slots with nonsense (NaN, −1, True), so that a read of what was never written shows. Tests set it."""


@dataclass(frozen=True)
class Part:
    """What a slot holds: a segment, or a piece of one that is longer than a slot."""

    unit: int
    is_last: bool
    segment: Segment


class _Slot:
    """Views of one slot's memory, by name."""

    def __init__(self, memory: NDArray[np.uint8], num_steps: int, num_lanes: int, spec: EnvSpec):
        shapes = _shapes(num_steps, num_lanes, spec)
        self.memory = memory
        self.header = memory[: 3 * 8].view(np.int64)  # steps, unit, whether it is the last part
        self.seconds = memory[3 * 8 : 4 * 8].view(np.float64)
        self.arrays: dict[str, Array] = {}
        start = ALIGNMENT
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self.arrays[name] = memory[start : start + size].view(dtype).reshape(shape)
            start += _aligned(size)


class Slots:
    """Fixed room, written by the worker that was granted a slot and read by the learner after it was announced.

    No lock: the pipe that carries the announcement orders the two. The memory is unlinked as soon as it is mapped
    (multiprocessing's heap does that), so nothing can be left behind.
    """

    def __init__(self, context: ForkServerContext, num_slots: int, num_steps: int, num_lanes: int, spec: EnvSpec):
        self.num_steps = num_steps
        self._shape = (num_slots, num_steps, num_lanes)
        self._spec = spec
        self._slot_bytes = ALIGNMENT + sum(
            _aligned(int(np.prod(shape)) * dtype.itemsize)
            for shape, dtype in _shapes(num_steps, num_lanes, spec).values()
        )
        self._memory = context.RawArray("b", num_slots * self._slot_bytes)
        self._map()
        for slot in self._slots:
            self._free(slot)

    def _map(self) -> None:
        num_slots, num_steps, num_lanes = self._shape
        rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_slots, self._slot_bytes)
        self._slots = [_Slot(row, num_steps, num_lanes, self._spec) for row in rows]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def write(self, number: int, unit: int, segment: Segment, start: int = 0) -> bool:
        """As many steps from `start` on as the slot holds; True if those were the last."""
        slot = self._slots[number]
        stop = min(start + self.num_steps, len(segment.reward))
        for name, array in slot.arrays.items():
            array[: stop - start] = getattr(segment, name)[start:stop]
        is_last = stop == len(segment.reward)
        slot.seconds[0] = segment.seconds
        slot.header[:] = stop - start, unit, is_last
        return is_last

    def read(self, number: int) -> Part:
        """A copy of what was announced; the slot is free again."""
        slot = self._slots[number]
        num_steps, unit, is_last = slot.header.tolist()
        if not 0 < num_steps <= self.num_steps:
            raise RuntimeError(f"slot {number} was announced but never written")
        arrays = {name: array[:num_steps].copy() for name, array in slot.arrays.items()}
        part = Part(unit, bool(is_last), Segment(**arrays, seconds=float(slot.seconds[0])))
        self._free(slot)
        return part

    def _free(self, slot: _Slot) -> None:
        if POISON:
            slot.memory[:] = 255
        slot.header[0] = UNWRITTEN


def join(parts: list[Segment]) -> Segment:
    """The pieces of one long segment, end to end."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in SEGMENT_ARRAYS}
    return Segment(**arrays, seconds=parts[-1].seconds)


def bytes_per_step(num_lanes: int, spec: EnvSpec) -> int:
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in _shapes(1, num_lanes, spec).values())


def _shapes(num_steps: int, num_lanes: int, spec: EnvSpec) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    here = (num_steps, num_lanes)
    obs, action = spec.observation_space, spec.action_space
    flag, number, real = np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float32)
    return {
        "obs": ((*here, *obs.shape), np.dtype(obs.dtype)),
        "action": ((*here, *spec.action_shape), np.dtype(action.dtype)),
        "log_prob": (here, real),
        "reward": (here, real),
        "terminated": (here, flag),
        "truncated": (here, flag),
        "next_obs": ((*here, *obs.shape), np.dtype(obs.dtype)),
        "version": (here, number),
        "episode": (here, number),
    }


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
