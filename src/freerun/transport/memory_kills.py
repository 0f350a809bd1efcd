"""Finds out whether the kernel has killed a process for lack of memory, from the counters that it keeps.

The kernel says of a process only that it died of SIGKILL. But it counts its own kills: for each control group (cgroup)
in memory.events (version 2) or memory.oom_control (version 1), and for the whole machine in /proc/vmstat.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

PROC = Path("/proc")
FRESH_SECONDS = 10.0
"""A kill that was counted longer ago does not explain the death of a worker that has just ended."""

Verdict = Literal["certain", "likely"]


class OutOfMemoryKills:
    """Kills in our own control group are certain; kills in groups above it, or on the whole machine, are a hint."""

    def __init__(self, proc: Path = PROC):
        self._own_kills, self._outer_kills = KillCounter(_own_files(proc)), KillCounter(_outer_files(proc))
        self._last_read = time.monotonic()

    @property
    def has_counters(self) -> bool:
        """True if this machine has at least one counter that can be read."""
        return self._own_kills.can_read or self._outer_kills.can_read

    def refresh(self) -> None:
        """Read the counters if the last reading is old. Regular calls tell when a kill happened."""
        now = time.monotonic()
        # Four readings in each FRESH_SECONDS: enough to date a kill, and rare enough to cost nothing.
        if now - self._last_read >= FRESH_SECONDS / 4:
            self._read(now)

    def claim(self) -> Verdict | None:
        """Whether lack of memory explains a process that has just died of SIGKILL. Each kill explains one death."""
        now = time.monotonic()
        # After a long pause nobody knows whether a new count is from just now, so the verdict is "likely" at best.
        was_watching = now - self._last_read < FRESH_SECONDS
        self._read(now)
        # Take from both: the groups above ours count our kills as well.
        is_own, is_outer = self._own_kills.take(), self._outer_kills.take()
        if is_own and was_watching:
            return "certain"
        return "likely" if is_own or is_outer else None

    def _read(self, now: float) -> None:
        self._last_read = now
        self._own_kills.read(now)
        self._outer_kills.read(now)


class KillCounter:
    """New kills according to several files, which may all count the same kill."""

    def __init__(self, files: Iterator[Path]):
        self._files = list(files)
        self._last_counts = self._read_counts()
        self._noticed_at: deque[float] = deque()  # one entry for each kill that explains no death yet

    @property
    def can_read(self) -> bool:
        return bool(self._last_counts)

    def read(self, now: float) -> None:
        """Note the kills that were counted since the last reading."""
        before, self._last_counts = self._last_counts, self._read_counts()
        # The maximum and not the sum, because one kill raises the counters of a group and of all groups above it.
        num_new = max((count - before.get(path, count) for path, count in self._last_counts.items()), default=0)
        self._noticed_at.extend([now] * num_new)
        while self._noticed_at and now - self._noticed_at[0] > FRESH_SECONDS:
            self._noticed_at.popleft()

    def take(self) -> bool:
        """Use up one kill; False if there is none."""
        if not self._noticed_at:
            return False
        self._noticed_at.popleft()
        return True

    def _read_counts(self) -> dict[Path, int]:
        counts = {}
        for path in self._files:
            # A container may hide some of the files, and a control group may disappear.
            with contextlib.suppress(OSError, ValueError):
                counts[path] = _parse_count(path.read_text())
        return counts


def _parse_count(text: str) -> int:
    """The number after `oom_kill` among other lines, or a number that is alone in its file."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return int(text)


# ---------------------------------------------------------------------------------------------- where the files are


class _ControlGroup(NamedTuple):
    """A control group that counts memory and that this process belongs to."""

    folder: Path
    mount: Path
    """The topmost folder that can be seen."""
    is_version_2: bool


def _own_files(proc: Path) -> Iterator[Path]:
    for group in _own_groups(proc):
        if group.is_version_2:
            yield group.folder / "memory.events"
        elif _counts_kills(group.folder / "memory.oom_control"):
            yield group.folder / "memory.oom_control"


def _outer_files(proc: Path) -> Iterator[Path]:
    """Counters that also count the kills of processes that are not ours."""
    yield proc / "vmstat"
    for folder, mount, is_version_2 in _own_groups(proc):
        if not is_version_2 and not _counts_kills(folder / "memory.oom_control"):
            yield folder / "memory.failcnt"  # an older kernel counts only how often the limit was reached
        for parent in folder.parents if folder != mount else ():
            yield parent / ("memory.events" if is_version_2 else "memory.oom_control")
            if parent == mount:
                break


def _counts_kills(path: Path) -> bool:
    try:
        return "oom_kill " in path.read_text()
    except OSError:
        return False


def _own_groups(proc: Path) -> Iterator[_ControlGroup]:
    mounts = list(_mounts(proc))
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0"
        if not is_version_2 and "memory" not in controllers.split(","):
            continue
        for mount_is_version_2, root, mount in mounts:
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            if mount_is_version_2 == is_version_2:
                # In a container the mounted folder may be the group itself, although the group's path is longer.
                folder = mount / inside if (mount / inside).is_dir() else mount
                yield _ControlGroup(folder, mount, is_version_2)


def _mounts(proc: Path) -> Iterator[tuple[bool, str, Path]]:
    """Mounts of control groups that may count memory: whether it is version 2, which group is mounted, and where."""
    try:
        lines = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # proc(5): the fields before " - " hold the root and the mount point, those after it the file system's type.
        before, _, after = line.partition(" - ")
        kind, *options = after.split()
        root, folder = (field.encode().decode("unicode_escape") for field in before.split()[3:5])
        if kind == "cgroup2":
            yield True, root, Path(folder)
        elif kind == "cgroup" and "memory" in options[-1].split(","):
            yield False, root, Path(folder)
