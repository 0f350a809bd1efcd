"""Whether the kernel has killed for lack of memory. It keeps count, for our control group and for others around it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

PROC = Path("/proc")
FRESH_SECONDS = 10.0
"""A kill that was counted earlier is not what has just ended a worker."""

Verdict = Literal["certain", "likely"]


class OutOfMemoryKills:
    """Those of our own control group are certain; those of groups above it, or of the whole machine, are a hint."""

    def __init__(self, proc: Path = PROC):
        self._ours, self._around = _Counter(_own_files(proc)), _Counter(_files_around(proc))
        self._last_look = time.monotonic()

    def look(self) -> None:
        """Now and then, so that it is known when a kill was."""
        now = time.monotonic()
        if now - self._last_look < FRESH_SECONDS / 4:
            return
        self._look(now)

    def claim(self) -> Verdict | None:
        """Whether the process that has just died of SIGKILL did so for lack of memory. Each kill explains one death."""
        now = time.monotonic()
        was_looking = now - self._last_look < FRESH_SECONDS
        self._look(now)
        ours, around = self._ours.take(), self._around.take()
        if ours and was_looking:
            return "certain"
        return "likely" if ours or around else None

    def _look(self, now: float) -> None:
        self._last_look = now
        self._ours.read(now)
        self._around.read(now)


class _Counter:
    """New kills, as the files tell that can be read; of the same kill more than one may tell."""

    def __init__(self, files: Iterator[Path]):
        self._files = list(files)
        self._last = self._numbers()
        self._new: deque[float] = deque()  # when each was noticed

    def read(self, now: float) -> None:
        before, self._last = self._last, self._numbers()
        num_new = max((number - before.get(path, number) for path, number in self._last.items()), default=0)
        self._new.extend([now] * num_new)
        while self._new and now - self._new[0] > FRESH_SECONDS:
            self._new.popleft()

    def take(self) -> bool:
        if not self._new:
            return False
        self._new.popleft()
        return True

    def _numbers(self) -> dict[Path, int]:
        numbers = {}
        for path in self._files:
            with contextlib.suppress(OSError, ValueError):
                numbers[path] = _kills_in(path.read_text())
        return numbers


def _kills_in(text: str) -> int:
    """`oom_kill 3` among others, or a number by itself."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return int(text)


# ---------------------------------------------------------------------------------------------- where they are


def _own_files(proc: Path) -> Iterator[Path]:
    for folder, _, is_unified in _groups(proc):
        if is_unified:
            yield folder / "memory.events"
        elif _has_kills(folder / "memory.oom_control"):
            yield folder / "memory.oom_control"


def _files_around(proc: Path) -> Iterator[Path]:
    """Groups above ours count the kills of others below them too."""
    yield proc / "vmstat"
    for folder, top, is_unified in _groups(proc):
        if not is_unified and not _has_kills(folder / "memory.oom_control"):
            yield folder / "memory.failcnt"  # an older kernel counts only that the limit was reached
        for above in folder.parents if folder != top else ():
            yield above / ("memory.events" if is_unified else "memory.oom_control")
            if above == top:
                break


def _has_kills(path: Path) -> bool:
    try:
        return "oom_kill " in path.read_text()
    except OSError:
        return False


def _groups(proc: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Our groups that count memory, by their folders; the top folder that can be seen; whether that is version 2.

    In a container the folder that is mounted may be the group itself, though its path is longer.
    """
    mounts = list(_mounts(proc))
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_unified = number == "0"
        if not is_unified and "memory" not in controllers.split(","):
            continue
        for unified, root, folder in mounts:
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            if unified == is_unified:
                yield folder / inside if (folder / inside).is_dir() else folder, folder, is_unified


def _mounts(proc: Path) -> Iterator[tuple[bool, str, Path]]:
    """Of control groups that may count memory: whether it is version 2, which group is mounted, and where."""
    try:
        lines = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, *options = after.split()
        root, folder = (field.encode().decode("unicode_escape") for field in before.split()[3:5])
        if kind == "cgroup2":
            yield True, root, Path(folder)
        elif kind == "cgroup" and "memory" in options[-1].split(","):
            yield False, root, Path(folder)
