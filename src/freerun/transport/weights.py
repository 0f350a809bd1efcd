"""Weights in shared memory: published once per version, copied by each worker when the version has moved."""

from __future__ import annotations

import time
from multiprocessing.context import ForkServerContext

import numpy as np

from freerun.core import FloatArray

NUM_BUFFERS = 2


class WeightsBoard:
    """One writer, any number of readers, no lock that a killed process could take with it.

    Version v lies in buffer v % 2. The writer marks a buffer as unfinished (-1) before it touches it, so a reader
    that sees the same mark before and after its copy has read one version and nothing else. Two buffers keep
    readers from starving: the newest version stays readable while the next one is being written.
    The memory is unlinked as soon as it is mapped (multiprocessing's heap does that): nothing can be left behind.
    """

    def __init__(self, context: ForkServerContext, num_weights: int):
        self._marks_memory = context.RawArray("q", [-1] * (NUM_BUFFERS + 1))
        self._data_memory = context.RawArray("f", NUM_BUFFERS * num_weights)
        self._num_weights = num_weights
        self._map()

    def _map(self) -> None:
        self._marks = np.frombuffer(self._marks_memory, dtype=np.int64)
        self._data = np.frombuffer(self._data_memory, dtype=np.float32).reshape(NUM_BUFFERS, self._num_weights)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_marks", "_data")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    @property
    def version(self) -> int:
        """The newest version that can be read; -1 before the first."""
        return int(self._marks[NUM_BUFFERS])

    def publish(self, weights: FloatArray, version: int) -> None:
        buffer = version % NUM_BUFFERS
        self._marks[buffer] = -1
        self._data[buffer] = weights
        self._marks[buffer] = version
        self._marks[NUM_BUFFERS] = version

    def read(self) -> tuple[FloatArray, int]:
        """A copy of the newest weights and their version; waits for the first publication."""
        while True:
            version = self.version
            buffer = version % NUM_BUFFERS
            if version >= 0 and self._marks[buffer] == version:
                weights = self._data[buffer].copy()
                if self._marks[buffer] == version:
                    return weights, version
            time.sleep(0.0005)
