"""Worker processes: light, torch-free, and gone when the learner is gone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_sharer, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import SemLock
from typing import Any

PR_SET_PDEATHSIG = 1
# A worker computes one small matrix product at a time: more threads cost start-up time and change the last bits.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_preload: list[str] = []


def preload(modules: Iterable[str]) -> None:
    """Have the fork server import these once, so that each worker starts in milliseconds and shares their memory."""
    _preload.extend(name for name in modules if name not in _preload)


def context() -> ForkServerContext:
    """Processes forked from a server that never loads torch: safe with threads and CUDA in the learner."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(list(_preload))
    with environment(ONE_THREAD), _without_socket():
        forkserver.ensure_running()
    return ctx


@contextlib.contextmanager
def _without_socket() -> Iterator[None]:
    """Reach the fork server by a handle of its socket, whose file and folder are removed: a kill cannot leave them."""
    server: Any = forkserver._forkserver
    if sys.platform != "linux" or server._forkserver_address or _settings().get("tempdir"):
        yield
        return
    with _folder_for_a_moment():
        yield
        handle = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
        os.unlink(server._forkserver_address)
        server._forkserver_address = f"/proc/self/fd/{handle}"


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """Files, and tensors in shared memory, may be sent through pipes; those who get them must have read them by the
    end. Python listens on a socket for that, in a folder which whoever is killed later would leave behind."""
    with _folder_for_a_moment():
        try:
            yield
        finally:
            resource_sharer.stop()


@contextlib.contextmanager
def nameless_semaphores() -> Iterator[None]:
    """Those that are made inside lose their names at the end, when all processes that share them must have opened them:
    Python would have another process unlink them, which a kill of the whole group takes too."""
    before = set(util._finalizer_registry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for key, finalizer in list(util._finalizer_registry.items()):  # type: ignore[attr-defined]
            if key not in before and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
                finalizer()


@contextlib.contextmanager
def _folder_for_a_moment() -> Iterator[None]:
    """Where Python puts its sockets."""
    settings, before = _settings(), _settings().get("tempdir")
    with tempfile.TemporaryDirectory(prefix="freerun-") as folder:
        settings["tempdir"] = folder
        try:
            yield
        finally:
            settings["tempdir"] = before


def _settings() -> dict[str, Any]:
    """Of this process, as multiprocessing keeps them."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return settings


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not import the user's script again: it may import torch, or lack a main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Run `target` in a process of its own, which ends with this one at the latest."""
    process = context().Process(target=target, args=arguments, daemon=True)
    with without_main():
        process.start()
    return process


def enter_worker() -> None:
    """First call in every worker: Ctrl-C is the learner's business, and nobody survives the learner."""
    gc.freeze()  # what the fork server has loaded is shared between workers as long as nobody visits it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Daemonic, so that a learner that fails does not wait for its workers; but some simulators start processes.
    _settings()["daemon"] = False
    let_go_of_fork_server()
    end_with_parent()  # the fork server, which ends with the learner


def end_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before that line
            os._exit(1)


def let_go_of_fork_server() -> None:
    """It ends when nobody holds its pipe, and each worker was given an end: so one that is stuck would keep it, and
    itself, alive after the learner's death. Should an environment need a fork server, it gets its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None


def stop(processes: Iterable[multiprocessing.process.BaseProcess], grace_seconds: float) -> None:
    """Wait a moment for workers that were told to end, then end the rest."""
    running = [process for process in processes if process.pid is not None]
    deadline = time.monotonic() + grace_seconds
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.exitcode is None:
            process.kill()
    for process in running:
        process.join()


def wait_for_any(processes: Iterable[multiprocessing.process.BaseProcess], seconds: float = 1.0) -> None:
    """Until one has ended: its pipe may break a moment before."""
    multiprocessing.connection.wait([process.sentinel for process in processes], seconds)


def is_worker() -> bool:
    return multiprocessing.parent_process() is not None
