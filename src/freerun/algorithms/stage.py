"""Work that goes on beside the learner: on a thread of its own, and on a GPU on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from freerun.core import State

Result = TypeVar("Result")


class Stage(Generic[Result]):
    """One piece of work at a time. What it reads must stay as it is until `finish`; what it writes is for then."""

    def __init__(self, name: str, device: torch.device):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"freerun-{name}")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._work: Future[Result] | None = None
        self.note: Callable[[State], None] = lambda state: None
        """Told when it is busy, and when it waits for more."""

    def start(self, work: Callable[[], Result]) -> None:
        if self._work is not None:
            raise RuntimeError("the stage has not finished its last piece of work")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._work = self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        self.note(State.BUSY)
        try:
            with torch.cuda.stream(self._stream):  # does nothing where there is none
                return work()
        finally:
            self.note(State.WAITING_FOR_DATA)

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        return self._work is not None and self._work.done()

    def finish(self) -> Result:
        """Wait for the work; its error, if it failed, is raised here."""
        assert self._work is not None
        work, self._work = self._work, None
        result = work.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result
