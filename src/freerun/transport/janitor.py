"""A process that outlives the learner by a few seconds and removes what a private Ray cluster leaves behind.

Ordinary workers do not need it: they die with the learner, and their shared memory has no name. A private Ray cluster
has processes that end slowly, and a folder of its own.
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

LIST_SECONDS = 10.0
"""The janitor lists the learner's processes this often, besides when it is told to."""
END_SECONDS = 1.0
MOST_ROUNDS = 5


class Janitor:
    """Watches a folder, and the processes that this process starts from now on."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._connection, theirs = processes.context().Pipe()
        # Processes that run already, such as workers of another mode, are not Ray's and must be left alone.
        self._spared = {process.pid for process in _descendants(os.getpid())}
        self._process = processes.start(_wait_and_clean_up, theirs, os.getpid(), self._spared, folder)
        # Only the janitor may hold its end of the pipe: the learner's death must be the end-of-file of the other end.
        theirs.close()

    def list_processes(self) -> None:
        """Tell the janitor that all processes have been started, so that it knows them from now on."""
        self._connection.send(None)

    def clean_up(self) -> None:
        """End the processes and remove the folder now, from this process, and end the janitor."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        _clean_up(set(_descendants(os.getpid())), {*self._spared, os.getpid()}, self._folder)


def _wait_and_clean_up(connection: Connection, learner_pid: int, spared: set[int], folder: Path) -> None:
    """Run in the janitor's process: wait until the learner is gone, then clean up."""
    os.setsid()  # a signal to the learner's whole process group must not reach the janitor
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.close_fork_server_pipe()
    descendants: set[psutil.Process] = set()
    # The kernel closes the learner's end of the pipe however the learner ends, also by SIGKILL.
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            if connection.poll(LIST_SECONDS):
                connection.recv()
            # Collect while the learner lives: once it is gone, its orphans can no longer be found by their parent.
            descendants |= set(_descendants(learner_pid))
    _clean_up(descendants, {*spared, os.getpid()}, folder)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _writers_to(folder: Path) -> set[psutil.Process]:
    """Processes that have a file open for writing in this folder.

    Every process of Ray has a log open there, whatever its name. This also finds a process that was just being started
    while the others ended: it has no parent any more and would wait for the others for a while.
    """
    writers = set()
    for process in psutil.process_iter(["open_files"]):
        files = process.info["open_files"] or []  # psutil gives None for the processes of another user
        if any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in files):
            writers.add(process)
    return writers


def _clean_up(descendants: set[psutil.Process], spared: set[int], folder: Path) -> None:
    alive, seconds = descendants, END_SECONDS
    # A process that ends now may have started another one a moment ago, so look again until nobody is left.
    for _ in range(MOST_ROUNDS):
        found = {process for process in alive | _writers_to(folder) if process.pid not in spared}
        if not found:
            break
        _, left = psutil.wait_procs(found, timeout=seconds)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=END_SECONDS)
        alive, seconds = set(left), 0.0  # only the first round lets processes end by themselves
    # The last process may have created a file while the folder was being removed, so try again.
    for _ in range(MOST_ROUNDS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.2)
