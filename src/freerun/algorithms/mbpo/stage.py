"""Work that runs beside the learner: on its own thread, and on a GPU on its own stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from freerun.core import State

Result = TypeVar("Result")


class BackgroundStage(Generic[Result]):
    """One piece of work at a time.

    What the work reads must not change until `finish`; what it writes may be read only after `finish`.
    """

    def __init__(self, name: str, device: torch.device):
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"freerun-{name}")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._work: Future[Result] | None = None
        self.thread: threading.Thread | None = None
        """The thread that works, once it has begun."""
        self.note: Callable[[State], None] = lambda state: None
        """Called when the stage becomes busy, and when it waits for more work."""

    def start(self, work: Callable[[], Result]) -> None:
        if self._work is not None:
            raise RuntimeError("the stage has not finished its last piece of work")
        if self._stream is not None:
            # Kernels that the learner has launched may still be writing what the work will read.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._work = self._executor.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        self.thread = threading.current_thread()
        self.note(State.BUSY)
        try:
            with torch.cuda.stream(self._stream):  # without a stream this does nothing
                return work()
        finally:
            self.note(State.WAITING_FOR_DATA)

    @property
    def is_busy(self) -> bool:
        """Whether work was started that `finish` has not yet collected."""
        return self._work is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        return self._work is not None and self._work.done()

    def ends_within(self, seconds: float) -> bool:
        """Wait up to this long for the work; return whether none is left."""
        return self._work is None or self._work in wait([self._work], seconds).done

    def finish(self) -> Result:
        """Wait for the work and return its result. If it failed, its error is raised here."""
        assert self._work is not None
        # If this wait is interrupted, the work is still there for `ends_within`: whoever ends the run must stop it.
        wait([self._work])
        work, self._work = self._work, None
        result = work.result()
        if self._stream is not None:
            # The thread has returned, but its kernels may still run: the learner's stream must wait for them.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result
