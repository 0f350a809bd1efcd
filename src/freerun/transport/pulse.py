"""Signs of life in shared memory: each worker counts its steps where the learner can see it."""

from __future__ import annotations

from collections.abc import MutableSequence
from multiprocessing.context import ForkServerContext

BEATS, EPISODE, PID, WIDTH = 0, 1, 2, 8
"""A worker's numbers lie in a cache line of their own."""
NO_EPISODE = -1


class Pulse:
    """One writer for each worker's numbers, no lock. Without a context it is for threads of one process."""

    def __init__(self, num_workers: int, context: ForkServerContext | None = None):
        size = num_workers * WIDTH
        self._memory: MutableSequence[int] = [0] * size if context is None else context.RawArray("q", size)
        for worker in range(num_workers):
            self.clear(worker)

    def of(self, worker: int) -> Vitals:
        """For the worker itself."""
        return Vitals(self._memory, worker * WIDTH)

    def beats(self, worker: int) -> int:
        return self._memory[worker * WIDTH + BEATS]

    def episode(self, worker: int) -> int:
        """The last one that it has begun, if any."""
        return self._memory[worker * WIDTH + EPISODE]

    def pid(self, worker: int) -> int:
        """Of its process, where it has told; 0 if not."""
        return self._memory[worker * WIDTH + PID]

    def clear(self, worker: int) -> None:
        """Before another worker takes its place."""
        self._memory[worker * WIDTH + EPISODE] = NO_EPISODE
        self._memory[worker * WIDTH + PID] = 0


class Vitals:
    """What one worker shows of itself."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: MutableSequence[int] | None = None, start: int = 0):
        self._memory: MutableSequence[int] = [0] * WIDTH if memory is None else memory
        self._start = start
        if memory is None:
            self.begin(NO_EPISODE)

    def beat(self) -> None:
        """Once before every step and reset."""
        self._memory[self._start] += 1

    def begin(self, episode: int) -> None:
        self._memory[self._start + EPISODE] = episode

    def enter(self, pid: int) -> None:
        self._memory[self._start + PID] = pid

    @property
    def beats(self) -> int:
        return self._memory[self._start]

    @property
    def episode(self) -> int:
        return self._memory[self._start + EPISODE]
