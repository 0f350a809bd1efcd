"""Heartbeats in shared memory: each worker counts its steps where the learner can see the count."""

from __future__ import annotations

from collections.abc import MutableSequence
from multiprocessing.context import ForkServerContext

BEATS, EPISODE, PID, WIDTH = 0, 1, 2, 8
"""Each worker has 8 words of 64 bits, a whole cache line: one worker's stores do not slow down its neighbour."""
NO_EPISODE = -1


class Heartbeats:
    """The heartbeats of all workers. Without a context, they serve the threads of one process.

    There is no lock, because each row has one writer and each number is one aligned word of 64 bits, which x86 and ARM
    both store and load in one piece. Readers take each number for itself: nothing relies on the order in which two
    numbers change, so it does no harm that ARM may show a reader the second store before the first.
    One number must be exact: the last episode of a dead worker. It is read after the kernel has reported the end of
    that process, and by then everything that the process wrote is visible.
    """

    def __init__(self, num_workers: int, context: ForkServerContext | None = None):
        size = num_workers * WIDTH
        self._memory: MutableSequence[int] = [0] * size if context is None else context.RawArray("q", size)
        for worker in range(num_workers):
            self.clear(worker)

    def writer(self, worker: int) -> Heartbeat:
        """The object with which this worker writes its own row."""
        return Heartbeat(self._memory, worker * WIDTH)

    def num_beats(self, worker: int) -> int:
        """The number of steps and resets that this worker, and the workers before it in this row, have begun."""
        return self._memory[worker * WIDTH + BEATS]

    @property
    def total_beats(self) -> int:
        """The number of steps and resets that all workers have begun, including workers that were replaced."""
        return sum(self._memory[BEATS::WIDTH])

    def episode(self, worker: int) -> int:
        """The last episode that the worker has begun, or NO_EPISODE."""
        return self._memory[worker * WIDTH + EPISODE]

    def pid(self, worker: int) -> int:
        """The process id that the worker has written, or 0."""
        return self._memory[worker * WIDTH + PID]

    def clear(self, worker: int) -> None:
        """Forget a worker before its successor starts. The count of beats goes on, so that totals never shrink."""
        self._memory[worker * WIDTH + EPISODE] = NO_EPISODE
        self._memory[worker * WIDTH + PID] = 0


class Heartbeat:
    """The row of one worker, which only that worker writes."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: MutableSequence[int] | None = None, start: int = 0):
        self._memory: MutableSequence[int] = [0] * WIDTH if memory is None else memory
        self._start = start
        if memory is None:
            self.begin_episode(NO_EPISODE)

    def beat(self) -> None:
        """Count one call. The worker calls this before every step and every reset."""
        # A load, an addition and a store: safe without a lock only because this row has a single writer.
        self._memory[self._start] += 1

    def begin_episode(self, episode: int) -> None:
        """Note the episode that the worker plays from now on."""
        self._memory[self._start + EPISODE] = episode

    def set_pid(self, pid: int) -> None:
        """Note the process id of the worker, where the learner cannot know it otherwise."""
        self._memory[self._start + PID] = pid

    @property
    def num_beats(self) -> int:
        return self._memory[self._start]

    @property
    def episode(self) -> int:
        return self._memory[self._start + EPISODE]
