"""The Python stack of another process, as faulthandler writes it: also where the process no longer runs Python."""

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
QUIET_SECONDS = 0.05
"""The stack is written line by line: it is whole when nothing was added for so long."""


class StackFile:
    """A file without a name that the learner and its workers share. It travels to processes as they are started."""

    def __init__(self) -> None:
        # Closed with the object: whoever forgets to must not leave a warning behind.
        self._file = tempfile.TemporaryFile("r+b", buffering=0)  # noqa: SIM115

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._file.fileno())

    def __setstate__(self, duplicate: Any) -> None:
        self._file = os.fdopen(duplicate.detach(), "r+b", buffering=0)

    def write_on_signal(self) -> None:
        """In a worker: from now on its stack can be captured."""
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=False)

    def capture(self, pid: int) -> str:
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
