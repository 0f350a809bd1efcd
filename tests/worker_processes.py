"""Which processes hold environments, among all that this one has started."""

from __future__ import annotations

import contextlib
import os

import psutil


def workers() -> set[int]:
    """Children of the fork server, which itself stays for the next run; of Ray's processes, the actors."""
    family = psutil.Process().children(recursive=True)
    found = set()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent is None or parent.pid == os.getpid():
                continue
            if parent.name() != "raylet" or (process.cmdline()[:1] and "FreerunActor" in process.cmdline()[0]):
                found.add(process.pid)
    return found
