"""A multiprocessing context that remembers the shared memory it gave out, so that a test can change single words."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from typing import Any


class RecordingContext(ForkServerContext):
    """Hands out shared memory as any context does, and keeps it in `arrays`, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[Any] = []

    def RawArray(self, typecode_or_type: Any, size_or_initializer: Any) -> Any:
        self.arrays.append(super().RawArray(typecode_or_type, size_or_initializer))
        return self.arrays[-1]
