"""Worker processes: they start quickly, do not import torch, and end when the learner ends."""

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
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.synchronize import SemLock
from typing import Any

PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl that asks for a signal when the parent process ends (linux/prctl.h)."""
# A worker computes one small matrix product at a time: more threads cost start-up time and change the last bits.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

START_SECONDS = 60.0
"""A worker may take this long to build its environments, if that is more than the step timeout."""
EXIT_SECONDS = 10.0
"""The fork server reports an exit code after the kernel has closed the pipes: seconds later on a busy machine."""
ASK_GRACE_SECONDS = 1.0
"""A child that has answered may take this long to end by itself."""

_preload: list[str] = []


# ---------------------------------------------------------------------------------------------- the fork server


def preload(modules: Iterable[str]) -> None:
    """Have the fork server import these once, so that each worker starts in milliseconds and shares their memory."""
    _preload.extend(name for name in modules if name not in _preload)


def context() -> ForkServerContext:
    """The context for all worker processes, with its fork server running.

    Workers are forked from a server process that never imports torch. A fork of the learner itself would copy locks
    that its threads hold, and a CUDA context that cannot be used after a fork.
    """
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(list(_preload))
    with environment(ONE_THREAD), _unlinked_server_socket():
        forkserver.ensure_running()
    return ctx


@contextlib.contextmanager
def _unlinked_server_socket() -> Iterator[None]:
    """Remove the file and the folder of the fork server's socket as soon as it listens, so that no kill leaves them.

    A socket without a name can still be reached through a handle of its file: connecting to /proc/self/fd/N leads to
    the same socket. This needs Linux's O_PATH.
    """
    server: Any = forkserver._forkserver
    if sys.platform != "linux" or server._forkserver_address or _process_config().get("tempdir"):
        yield
        return
    with _temporary_socket_folder():
        yield
        # First the handle, then the unlink: in the other order the socket could never be reached again.
        handle = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
        os.unlink(server._forkserver_address)
        server._forkserver_address = f"/proc/self/fd/{handle}"


@contextlib.contextmanager
def resource_sharing() -> Iterator[None]:
    """Allow files and tensors in shared memory to be sent through pipes. Receivers must have read them by its end.

    Python serves such resources from a socket in a temporary folder. The folder is removed at the end, because a
    process that is killed later would leave it behind.
    """
    with _temporary_socket_folder():
        try:
            yield
        finally:
            resource_sharer.stop()


@contextlib.contextmanager
def nameless_semaphores() -> Iterator[None]:
    """Unlink the semaphores that are made within it. All processes that share them must have opened them at its end.

    Python leaves the unlinking to its resource tracker, a process that a kill of the whole group kills too.
    """
    before = set(util._finalizer_registry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # A copy is made at once. Up to Python 3.11 a list of the items may collect garbage on the way, which may change
        # the registry.
        for key, finalizer in util._finalizer_registry.copy().items():  # type: ignore[attr-defined]
            if key not in before and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
                finalizer()


@contextlib.contextmanager
def _temporary_socket_folder() -> Iterator[None]:
    """Have multiprocessing create its sockets in a folder that is removed at the end."""
    config, before = _process_config(), _process_config().get("tempdir")
    with tempfile.TemporaryDirectory(prefix="freerun-") as folder:
        config["tempdir"] = folder
        try:
            yield
        finally:
            config["tempdir"] = before


def _process_config() -> dict[str, Any]:
    """The settings that multiprocessing keeps for this process."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


# ---------------------------------------------------------------------------------------------- starting


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them at the end."""
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


def start(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Run `target` in a process of its own, which ends with this one at the latest."""
    process = context().Process(target=target, args=arguments, daemon=True)
    with without_main():
        process.start()
    return process


def server_context() -> SpawnContext:
    """The context for processes that load torch and may start workers of their own.

    They are spawned and not forked: neither torch's threads nor CUDA survive a fork of this process, and the fork
    server of the workers must not load torch. Tests put a faster start in the place of this function.
    """
    return multiprocessing.get_context("spawn")


def start_server(target: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """Run `target(connection, *arguments)` in a process that may start workers of its own; return our end of the pipe.

    Daemonic processes may have no children, so it is none: `target` should call `end_with_parent`.
    """
    spawning = server_context()
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=target, args=(theirs, *arguments))
    with without_main():
        process.start()
    theirs.close()  # so that reading raises EOFError as soon as the process has died
    return process, ours


def ask(target: Callable[..., None], *arguments: object, seconds: float) -> Any:
    """Run `target(connection, *arguments)` in a child process and return what it sends.

    Raise TimeoutError if it sends nothing within the time, and ChildProcessError if it dies before.
    """
    ours, theirs = context().Pipe()
    process = start(target, theirs, *arguments)
    theirs.close()  # or a child that dies would leave an end of the pipe open, and `poll` would wait the whole time
    try:
        if not ours.poll(seconds):
            raise TimeoutError(f"a process did not answer within {seconds:g} s")
        return ours.recv()
    except (EOFError, ConnectionResetError):
        process.join(EXIT_SECONDS)
        raise ChildProcessError(f"a process died with exit code {process.exitcode}") from None
    finally:
        ours.close()
        stop([process], ASK_GRACE_SECONDS)


# ---------------------------------------------------------------------------------------------- inside a worker


def enter_worker() -> None:
    """Prepare this process to be a worker. Every worker calls this first."""
    # Keep the garbage collector away from what the fork server has loaded. Workers share those memory pages with each
    # other until one of them writes there, and a collection writes into every object that it visits.
    gc.freeze()
    # Ctrl-C reaches the whole process group, and only the learner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Workers are daemonic, so that a learner that fails does not wait for them. But Python forbids daemonic processes
    # to start others, and some simulators do.
    _process_config()["daemon"] = False
    close_fork_server_pipe()
    end_with_parent()  # the parent is the fork server, which ends with the learner


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The kernel signals only a death after the call. A parent that died before it has already been replaced by
        # init or a subreaper, which the changed parent id shows.
        if os.getppid() != parent:
            os._exit(1)


def close_fork_server_pipe() -> None:
    """Close the copy of the fork server's pipe that this process has inherited.

    The fork server ends when nobody holds the other end of that pipe, and every worker is given one. So a worker that
    is stuck would keep the fork server alive after the learner's death, and the fork server would keep it alive.
    An environment that needs a fork server gets one of its own.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None


def is_worker() -> bool:
    """True in a process that multiprocessing has started."""
    return multiprocessing.parent_process() is not None


# ---------------------------------------------------------------------------------------------- ending


def stop(processes: Iterable[multiprocessing.process.BaseProcess], grace_seconds: float) -> None:
    """Wait for processes that were told to end, and kill those that have not ended when the time is over."""
    running = [process for process in processes if process.pid is not None]
    deadline = time.monotonic() + grace_seconds
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.exitcode is None:
            process.kill()
    for process in running:
        process.join()


def kill(pid: int) -> None:
    """Kill a process, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for_any(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Wait for the exit code of a process whose pipe is broken. It may have closed the pipe itself: hence the limit."""
    multiprocessing.connection.wait([process.sentinel for process in processes if process.pid], EXIT_SECONDS)


def usable_cores() -> list[int]:
    """The cores that this process may use. macOS cannot restrict a process to some of them, so all count there."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
