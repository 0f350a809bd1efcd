"""Captures the Python stack of another process with faulthandler, even if that process is stuck in C code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from multiprocessing import reduction
from typing import Any

SIGNAL = signal.SIGUSR2
WAIT_SECONDS = 1.0
"""A process that has written nothing by then does not answer, for example because it was stopped."""
QUIET_SECONDS = 0.05
"""faulthandler writes line by line. The stack is complete when nothing was added for this long."""


class StackFile:
    """A file without a name that the learner shares with its workers. It travels to processes as they are started."""

    def __init__(self) -> None:
        # The operating system removes it with the last descriptor: no kill can leave it behind. It is closed with the
        # object, so that a forgotten `close` leaves no warning.
        self._file = tempfile.TemporaryFile("r+b", buffering=0)  # noqa: SIM115

    def __getstate__(self) -> object:
        return reduction.DupFd(self._file.fileno())

    def __setstate__(self, duplicate: Any) -> None:
        self._file = os.fdopen(duplicate.detach(), "r+b", buffering=0)

    def write_on_signal(self) -> None:
        """Let others capture the stack of this process from now on. Workers call this."""
        # faulthandler's handler is plain C and runs inside the signal, so it needs neither the GIL nor a running
        # interpreter: it also answers where a worker is stuck in a simulator's C code.
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=False)

    def capture(self, pid: int) -> str:
        """The stack of this process, or a remark that it did not answer in time."""
        # All processes share one file offset, for the descriptors are duplicates: the worker writes where we seek to.
        self._file.truncate(0)
        self._file.seek(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        deadline, size = time.monotonic() + WAIT_SECONDS, 0
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)
            before, size = size, os.fstat(self._file.fileno()).st_size
            if size and size == before:
                break
        self._file.seek(0)
        return self._file.read().decode(errors="replace") or "(it did not answer)"

    def close(self) -> None:
        self._file.close()
