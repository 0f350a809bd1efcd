"""A process that outlives the learner by a moment, and clears away what others have left behind.

Workers need none: they die with the learner, and shared memory has no name. But a private Ray has processes that take
their time, and a folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from freerun.transport import processes

LOOK_SECONDS = 10.0
END_SECONDS = 1.0


class Janitor:
    """Watches over a folder, and over the processes that this one starts from now on."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ours, theirs = processes.context().Pipe()
        self._others = {process.pid for process in _family(os.getpid())}
        self._process = processes.start(_wait_and_clear, theirs, os.getpid(), self._others, folder)
        theirs.close()

    def look(self) -> None:
        """All processes have been started."""
        self._ours.send(None)

    def clear(self) -> None:
        """What is there, now; nobody watches any more."""
        self._process.kill()
        self._process.join()
        self._ours.close()
        family = {*_family(os.getpid()), *_started_for(self._folder)}
        _clear({process for process in family if process.pid not in self._others}, self._folder)


def _wait_and_clear(connection: Connection, learner: int, others: set[int], folder: Path) -> None:
    """In the janitor: until the learner is gone."""
    os.setsid()  # a kill of the learner's whole group must not reach it
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.let_go_of_fork_server()
    family: set[psutil.Process] = set()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            if connection.poll(LOOK_SECONDS):
                connection.recv()
            family |= set(_family(learner))
    family |= set(_started_for(folder))
    _clear({process for process in family if process.pid not in {*others, os.getpid()}}, folder)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _started_for(folder: Path) -> Iterator[psutil.Process]:
    """Whose command line has an option with this folder: one that was being started as the others ended is nobody's
    child any more, and would wait for them for a while."""
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if any(word.startswith("--") and str(folder) in word for word in words):
            yield process


def _clear(family: set[psutil.Process], folder: Path) -> None:
    _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_SECONDS)
    for _ in range(5):  # the last of them may have been writing there
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.2)
