"""A policy that is asked about the same observation twice need not compute twice.

Where observations are made of few states (hosts that are compromised or not, boards, grids), most have come before. A
simulator evicts the policy's weights from the caches at every step, so a lookup is much cheaper than a forward pass.
The outputs are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

from freerun.algorithms.heads import Forward
from freerun.core import Array, FloatArray

MOST_BYTES = 2**20
"""Of outputs and observations that are kept."""
ENOUGH = 256
"""New observations, after which one can tell."""


class Recall:
    """A `Forward` that keeps what it has put out, until the weights change."""

    __slots__ = ("_forward", "_kept", "_num_known", "_num_new", "is_useful")

    def __init__(self, forward: Forward):
        self._forward = forward
        self._kept: dict[bytes, tuple[FloatArray, Any]] = {}
        self._num_known = self._num_new = 0
        self.is_useful = True
        """As far as one can tell: to be asked after `forget`."""

    def __call__(self, obs: Array, output: FloatArray) -> Any:
        key = obs.tobytes()
        known = self._kept.get(key)
        if known is not None:
            self._num_known += 1
            output[...], prepared = known
            return prepared
        self._num_new += 1
        prepared = self._forward(obs, output)
        if len(self._kept) * (obs.nbytes + output.nbytes) < MOST_BYTES:
            self._kept[key] = output.copy(), prepared
        return prepared

    def forget(self) -> None:
        """The weights are others. Where observations have not come again, they will not."""
        if self._num_new >= ENOUGH:
            self.is_useful = self._num_known > self._num_new
            self._num_known = self._num_new = 0
        self._kept.clear()
