"""A cache of a policy's outputs by observation.

Where observations consist of few states (hosts that are compromised or not, boards, grids), most of them have occurred
before. A simulator evicts the policy's weights from the processor caches at every step, so a lookup is much cheaper
than a forward pass. A cached output is the same as a computed one, bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any

from freerun.algorithms.policies.action_heads import SingleForward
from freerun.core import Array, FloatArray

MAX_BYTES = 2**20
"""The memory that one cache may take, including all that Python needs to store the entries."""
MIN_MISSES_TO_JUDGE = 256
"""After this many observations that were not in the cache, it is decided whether the cache is useful."""
ALIGNMENT = 16
"""Python's allocator rounds the size of every object up to a multiple of this."""
TABLE_BYTES = 96
"""The share of one entry in the dictionary's own table. A slot of the table takes 30 bytes. Right after the table has
doubled, every entry has two slots, and while it is copied the old table exists as well: 90 bytes."""


class OutputCache:
    """A `SingleForward` that stores its outputs until the weights change."""

    __slots__ = ("_entries", "_forward", "_max_entries", "_num_hits", "_num_misses", "is_useful")

    def __init__(self, forward: SingleForward):
        self._forward = forward
        self._entries: dict[bytes, tuple[FloatArray, Any]] = {}
        self._max_entries: int | None = None  # unknown until the first entry has been measured
        self._num_hits = self._num_misses = 0
        self.is_useful = True
        """Whether hits outnumbered misses when that was last judged. It changes only in `clear`."""

    def __call__(self, obs: Array, output: FloatArray) -> Any:
        key = obs.tobytes()
        entry = self._entries.get(key)
        if entry is not None:
            self._num_hits += 1
            output[...], prepared = entry
            return prepared
        self._num_misses += 1
        prepared = self._forward(obs, output)
        if self._max_entries is None:
            # All entries of a policy have the same shapes, so measuring the first one is enough.
            self._max_entries = MAX_BYTES // (TABLE_BYTES + _num_bytes((key, (output.copy(), prepared))))
        if len(self._entries) < self._max_entries:
            self._entries[key] = output.copy(), prepared
        return prepared

    def clear(self) -> None:
        """Drop all entries, because the weights have changed, and judge whether the cache is worth its time."""
        if self._num_misses >= MIN_MISSES_TO_JUDGE:
            self.is_useful = self._num_hits > self._num_misses
            self._num_hits = self._num_misses = 0
        self._entries.clear()


def _num_bytes(item: object) -> int:
    """The memory that an object takes, with everything in it if it is a list or a tuple."""
    own = -(-sys.getsizeof(item) // ALIGNMENT) * ALIGNMENT
    return own + sum(_num_bytes(part) for part in item) if isinstance(item, list | tuple) else own
