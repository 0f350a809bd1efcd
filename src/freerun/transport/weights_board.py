"""Weights in shared memory: the learner publishes each version once, and workers copy it when the version changes."""

from __future__ import annotations

import time
import zlib
from multiprocessing.context import ForkServerContext

import numpy as np

from freerun.core import FloatArray

NUM_BUFFERS = 2
UNFINISHED = -1
RETRY_SECONDS = 0.0005


class WeightsBoard:
    """One writer and any number of readers, without a lock that a killed process could hold for ever.

    Version v lies in buffer v % 2. Two buffers keep readers from starving: the newest version stays readable while the
    next one is being written.

    Order of the stores. The writer marks a buffer as UNFINISHED before it touches the data, and marks it with its
    version afterwards. A reader that sees the same version before and after its copy has copied that version and
    nothing else, provided that it sees the writer's stores in their order. x86 guarantees that order; ARM does not, and
    Python has no memory fence. So each buffer also has a checksum over its version and its weights, and a reader
    returns a copy only if the checksum fits. Whatever mixture of old and new memory it has seen, it reads again. A
    mixture fits by chance with a probability of 2⁻³², and only in a read that overlaps with a write.

    The memory has no name: multiprocessing's heap unlinks its file as soon as it is mapped. So a kill leaves nothing.
    """

    def __init__(self, context: ForkServerContext, num_weights: int):
        # The version in each buffer, and in the last place the newest version of all.
        self._marks_memory = context.RawArray("q", [UNFINISHED] * (NUM_BUFFERS + 1))
        self._checksums_memory = context.RawArray("q", NUM_BUFFERS)
        self._data_memory = context.RawArray("f", NUM_BUFFERS * num_weights)
        self._num_weights = num_weights
        self._map()

    def _map(self) -> None:
        """Make numpy views of the shared memory. Views cannot travel to another process, so each makes its own."""
        self._marks = np.frombuffer(self._marks_memory, dtype=np.int64)
        self._checksums = np.frombuffer(self._checksums_memory, dtype=np.int64)
        self._data = np.frombuffer(self._data_memory, dtype=np.float32).reshape(NUM_BUFFERS, self._num_weights)

    def __getstate__(self) -> dict[str, object]:
        views = ("_marks", "_checksums", "_data")
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    @property
    def version(self) -> int:
        """The newest version that can be read; -1 before the first."""
        return int(self._marks[NUM_BUFFERS])

    def publish(self, weights: FloatArray, version: int) -> None:
        """Make these weights the newest version. Only the learner calls this, with versions that increase by one."""
        buffer = version % NUM_BUFFERS
        whole = np.ascontiguousarray(weights, np.float32)
        checksum = _checksum(whole, version)  # before the buffer is marked: readers then wait as little as possible
        # The order of these five stores matters, see above. The newest version comes last: a reader that
        # sees it should find a finished buffer. If ARM shows it too early, the mark or the checksum does not fit.
        self._marks[buffer] = UNFINISHED
        self._data[buffer] = whole
        self._checksums[buffer] = checksum
        self._marks[buffer] = version
        self._marks[NUM_BUFFERS] = version

    def read(self) -> tuple[FloatArray, int]:
        """A copy of the newest weights and their version. This waits for the first publication."""
        # A failed attempt has met a write, which takes microseconds. Pausing keeps the reader from using up a core.
        while (found := self.try_read()) is None:
            time.sleep(RETRY_SECONDS)
        return found

    def try_read(self) -> tuple[FloatArray, int] | None:
        """One attempt. None before the first publication, and if the copy mixes two versions."""
        version = self.version
        buffer = version % NUM_BUFFERS
        if version < 0 or self._marks[buffer] != version:
            return None
        weights = self._data[buffer].copy()
        # The mark is compared again after the copy, because the writer may have come round to this buffer meanwhile.
        if self._marks[buffer] != version or self._checksums[buffer] != _checksum(weights, version):
            return None
        return weights, version


def _checksum(weights: FloatArray, version: int) -> int:
    """CRC-32 of the weights, started with the version: a buffer that holds another version whole does not fit either.

    zlib reads 1 to 2 GB a second. For the 50 KB of a small network this takes a worker 0.02 ms, once per version.
    """
    return zlib.crc32(weights.data, version & 0xFFFFFFFF)
