"""What a run in a process of its own leaves behind: processes, shared memory, temporary files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import preloaded_python
import psutil

NOT_OF_A_RUN = {"torchinductor_root"}
"""Torch's own cache, for all runs of a user."""


def environment() -> dict[str, str]:
    """For processes that can import what lies beside the tests."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class OutsideRun:
    """`freerun train` in a process of its own, watched from outside."""

    process: preloaded_python.Process | subprocess.Popen[bytes]

    def __init__(
        self,
        arguments: Sequence[str],
        run_dir: Path,
        command: Sequence[str] = ("-m", "freerun", "train"),
        is_preloaded: bool = True,
    ):
        """Start it. Without `is_preloaded` that takes longer, and Python starts as for a user."""
        self.run_dir = run_dir
        self._temporary = tempfile.mkdtemp(prefix="watched-")
        self._shared: set[Path] = set()  # memory with a name that its processes have used
        self._family: dict[int, psutil.Process] = {}
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the object
        words = [*command, "--run-dir", str(run_dir), *arguments]
        variables = {**environment(), "TMPDIR": self._temporary}
        if is_preloaded:
            self.process = preloaded_python.Process(
                words, env=variables, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
            )
        else:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env=variables,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> OutsideRun:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.output.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def num_updates(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for_updates(self, number: int, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while self.num_updates() < number:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the run has not come to update {number}:\n{self.text}")
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        """All processes that it has started, directly or not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family |= {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        for pid in [self.process.pid, *self._family]:
            self._shared |= _named_memory(pid)
        return [process for process in self._family.values() if _is_alive(process)]

    def left_after(self, seconds: float) -> list[str]:
        """What is still there at that time after its end, at the latest; nothing, hopefully."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        files = [name for name in os.listdir(self._temporary) if name not in NOT_OF_A_RUN]
        shared = [str(path) for path in self._shared if path.exists()]
        return [*(str(process) for process in self.family()), *files, *shared]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _named_memory(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped, and that have not been unlinked."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return {Path(path) for path in paths if not path.endswith("(deleted)")}
