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
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from freerun.transport import processes

LOOK_SECONDS = 10.0
END_SECONDS = 1.0
ROUNDS = 5


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
        _clear(set(_family(os.getpid())), {*self._others, os.getpid()}, self._folder)


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
    _clear(family, {*others, os.getpid()}, folder)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _writers_to(folder: Path) -> set[psutil.Process]:
    """All that Ray starts have a log open there, whatever they call themselves: one that was being started as the
    others ended is nobody's child any more, and would wait for them for a while."""
    writers = set()
    for process in psutil.process_iter(["open_files"]):
        files = process.info["open_files"] or []  # None: somebody else's
        if any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in files):
            writers.add(process)
    return writers


def _clear(family: set[psutil.Process], others: set[int], folder: Path) -> None:
    alive, seconds = family, END_SECONDS
    for _ in range(ROUNDS):  # one that is ended now may have started another a moment ago
        family = {process for process in alive | _writers_to(folder) if process.pid not in others}
        if not family:
            break
        _, left = psutil.wait_procs(family, timeout=seconds)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=END_SECONDS)
        alive, seconds = set(left), 0.0
    for _ in range(ROUNDS):  # the last of them may have been writing there
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.2)
