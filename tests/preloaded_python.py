"""Starts Python programs for tests without paying for `import torch` each time.

A run in a process of its own spends some three seconds of CPU time on importing torch, Gymnasium and freerun, and often
less than half a second on what the test looks at. So each pytest process keeps a *starter*: a process that has imported
those modules, and forks a child for every program that a test asks for.

    process = preloaded_python.Process(["-m", "freerun", "train", ...], stdout=subprocess.PIPE)
    done = preloaded_python.run("script.py", cwd=tmp_path)

The child is a process like any other, with its own arguments, folder, environment, files and `__main__`. It can be
signalled and killed, and ends as any interpreter does. Two things differ from `python ...`: its parent is the starter,
which lives as long as the pytest process; and modules of PRELOADED are already imported. So a test stays with
`subprocess` if it is about imports, about the start of the interpreter or its flags, about the parent of the program,
or if it sets one of the variables that libraries read when they are imported. The last is checked here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PRELOADED = (
    "freerun.tools.cli.main",
    "freerun.tools.cli.train_flags",
    "freerun.experiment",
    "freerun.run.series",
    "freerun.collecting.modes.continuous",
    "freerun.algorithms.ppo.ppo",
    "freerun.algorithms.sac.sac",
    "freerun.algorithms.mbpo.mbpo",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer of a run imports it, which takes as long as torch itself
)
READ_AT_IMPORT = ("CUDA_", "LANG", "LC_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
"""Variables with these beginnings count when the interpreter starts or a library is imported."""
READ_LATER = ("PYTHONBREAKPOINT", "PYTHONPATH")
"""These count when `breakpoint` is called, and when a program gets its search path here."""
ENVIRONMENT = dict(os.environ)
"""What the starter is started with: as it is when pytest begins, whichever test needs the starter first."""


# ---------------------------------------------------------------------------------------------- in a test


class Process:
    """A program that runs, with the part of `subprocess.Popen` that tests use. What it writes is text."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ):
        """Start `python *words`, where the words are `-m module ...`, `-c code ...` or `script.py ...`."""
        self.words = list(words)
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        environment = dict(os.environ if env is None else env)
        _check(environment)
        request = {
            "words": self.words,
            "folder": str(Path.cwd() if cwd is None else cwd),
            "environment": environment,
            "start_new_session": start_new_session,
        }
        with contextlib.ExitStack() as theirs:
            if stdin == subprocess.PIPE:
                stdin, writable = os.pipe()
                theirs.callback(os.close, stdin)
                self.stdin = open(writable, "w", encoding="utf-8")  # noqa: SIM115 - `communicate` closes it
            if stdout == subprocess.PIPE:
                self.stdout, stdout = _readable_pipe(theirs)
            if stderr == subprocess.PIPE:
                self.stderr, stderr = _readable_pipe(theirs)
            if stderr == subprocess.STDOUT:
                stderr = 1 if stdout is None else stdout
            streams = [_descriptor(stream, number, theirs) for number, stream in enumerate((stdin, stdout, stderr))]
            self._reports, report_to = _readable_pipe(theirs)
            asked = theirs.enter_context(tempfile.TemporaryFile())
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            socket.send_fds(_starter().socket, [b"!"], [*streams, asked.fileno(), report_to])
        self.pid = int(self._report())

    def __del__(self) -> None:
        """Close what a test has not read to its end, as a test need not that only kills the program."""
        for stream in (self.stdin, self.stdout, self.stderr, getattr(self, "_reports", None)):
            if stream is not None:
                stream.close()

    def _report(self) -> str:
        line = self._reports.readline()
        assert line, "the starter is gone"
        return line

    def poll(self) -> int | None:
        """The exit code, negative if a signal has ended the process; None while it runs."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode = int(self._report())
            self._reports.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._reports], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.words, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended between the two calls
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write the input, read what it writes until it has closed its pipes, and wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found: dict[IO[str], list[bytes]] = {}
        with selectors.DefaultSelector() as waiting:
            left = (input or "").encode()
            if self.stdin is not None:
                if left:
                    os.set_blocking(self.stdin.fileno(), False)
                    waiting.register(self.stdin, selectors.EVENT_WRITE)
                else:
                    self.stdin.close()
            for stream in (self.stdout, self.stderr):
                if stream is not None:
                    found[stream] = []
                    waiting.register(stream, selectors.EVENT_READ)
            while waiting.get_map():
                seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = waiting.select(seconds)
                if not ready and seconds is not None:
                    raise subprocess.TimeoutExpired(self.words, timeout or 0.0)
                for key, _ in ready:
                    stream = key.fileobj  # type: ignore[assignment]
                    assert stream is not None
                    if stream is self.stdin:
                        with contextlib.suppress(BrokenPipeError):
                            left = left[os.write(key.fd, left[: select.PIPE_BUF]) :]
                            if left:
                                continue
                    elif content := os.read(key.fd, 65536):
                        found[stream].append(content)
                        continue
                    waiting.unregister(stream)
                    stream.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        out, err = (b"".join(found[stream]).decode() if stream else "" for stream in (self.stdout, self.stderr))
        return out, err


def run(
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    timeout: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end and return its exit code and what it has written."""
    stdin = None if input is None else subprocess.PIPE
    process = Process(words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=env)
    try:
        out, err = process.communicate(input, timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.words, process.wait(), out, err)


def _check(environment: Mapping[str, str]) -> None:
    """The starter has read these variables already, so a program cannot have others."""
    for name in environment.keys() | ENVIRONMENT.keys():
        is_read = name.startswith(READ_AT_IMPORT) and name not in READ_LATER
        if is_read and environment.get(name) != ENVIRONMENT.get(name):
            raise ValueError(f"{name} is read when modules are imported: use subprocess for this program")


def _readable_pipe(theirs: contextlib.ExitStack) -> tuple[IO[str], int]:
    """A pipe that the program writes into; our copy of its end is closed with `theirs`, or the pipe would never end."""
    readable, writable = os.pipe()
    theirs.callback(os.close, writable)
    return open(readable, encoding="utf-8"), writable


def _descriptor(stream: int | IO[Any] | None, number: int, theirs: contextlib.ExitStack) -> int:
    if stream is None:
        return number
    if stream == subprocess.DEVNULL:
        stream = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, stream)
    return stream if isinstance(stream, int) else stream.fileno()


class _Starter:
    """The starter of this pytest process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, __file__, str(number)]
            self.process = subprocess.Popen(command, env=ENVIRONMENT, pass_fds=[number])

    def stop(self) -> None:
        self.socket.close()
        self.process.wait(60)


_started: list[_Starter] = []


def _starter() -> _Starter:
    if not _started:
        _started.append(_Starter())
    return _started[0]


def stop() -> None:
    """End the starter, if there is one. Programs that still run go on."""
    while _started:
        _started.pop().stop()


# ---------------------------------------------------------------------------------------------- in the starter


def main() -> None:
    """Import what programs need, and fork one for each request, until pytest closes the socket."""
    pythonpath = _folders(os.environ)
    installed = [path for path in sys.path[1:] if path not in pythonpath]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or a collection in a child would write into every object, and so copy all memory pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; pytest decides when this ends
    if (request := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run_program(request, installed)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request and report the exit codes. Returns a request in each child, and None at the end.

    There is one thread, so a fork copies no lock that another thread holds. OpenBLAS has threads of its own, and
    handlers that end them before a fork and start them after it.
    """
    reports: dict[int, tuple[int, int]] = {}  # process and pipe by the descriptor that tells of its end
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready in reports:
                pid, report_to = reports.pop(ready)
                waiting.unregister(ready)
                _, status = os.waitpid(pid, 0)
                _report(report_to, os.waitstatus_to_exitcode(status))
                os.close(report_to)
                os.close(ready)
                continue
            _, descriptors, _, _ = socket.recv_fds(control, 1, 5)
            if not descriptors:
                return None
            pid = os.fork()
            if pid == 0:
                control.detach()
                return _enter_program(descriptors)
            *streams, report_to = descriptors
            for descriptor in streams:
                os.close(descriptor)
            _report(report_to, pid)
            handle = os.pidfd_open(pid)
            reports[handle] = pid, report_to
            waiting.register(handle, select.POLLIN)


def _report(report_to: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # a test has lost interest in the process
        os.write(report_to, f"{number}\n".encode())


# ---------------------------------------------------------------------------------------------- in the program


def _enter_program(descriptors: list[int]) -> dict[str, Any]:
    """Give this process the files, the folder and the environment that were asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(descriptors[3], "rb") as asked:
        request: dict[str, Any] = json.load(asked)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)  # what belongs to the starter, and to other programs
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request


def _run_program(request: dict[str, Any], installed: list[str]) -> None:
    """Run the program as `__main__`, with what Python itself would set up for it."""
    import numpy

    numpy.random.seed()  # or all programs would draw the same numbers; `random` has its own handler for forks
    tempfile.tempdir = None  # TMPDIR may have changed
    importlib.invalidate_caches()
    # Whether a stream belongs to a terminal is looked at when it is opened. They stay open, as the ones of any program.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    kind, *words = request["words"]
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:] = [first, *_folders(os.environ), *installed]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        source = words[0].encode()
        sys.argv = ["-c", *words[1:]]
    elif kind == "-m":
        found = importlib.util.find_spec(words[0])
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{words[0]}.__main__")
        assert found is not None, f"there is no module {words[0]}"
        assert found.origin is not None, f"{words[0]} has no file"
        main.__spec__, main.__loader__, main.__package__ = found, found.loader, found.parent
        main.__file__ = found.origin
        source = Path(found.origin).read_bytes()
        sys.argv = [found.origin, *words[1:]]
    else:
        main.__file__ = os.path.abspath(kind)
        source = Path(kind).read_bytes()
        sys.argv = [kind, *words]
    sys.orig_argv = [sys.executable, *request["words"]]
    exec(compile(source, getattr(main, "__file__", "<string>"), "exec"), main.__dict__)


def _folders(environment: Mapping[str, str]) -> list[str]:
    """What PYTHONPATH adds to the search path: an empty word is the current folder."""
    path = environment.get("PYTHONPATH")
    return [os.path.abspath(word) for word in path.split(os.pathsep)] if path else []


if __name__ == "__main__":
    main()
