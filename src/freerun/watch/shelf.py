"""The runs that may be looked at: those in the folders that were named, and no others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from freerun.watch.runs import CONFIG, WatchedRun, born, read_or_empty

MOST_HELD = 8
"""Runs whose curves and timelines are kept in memory; the one not asked for the longest is read anew when it is."""
MOST_LISTED = 500
DEPTH = 2
"""Folders of runs in a folder of runs: workflows have those."""


class Shelf:
    def __init__(self, paths: Sequence[Path]):
        self._paths = [path.absolute() for path in paths]
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._held: OrderedDict[str, WatchedRun] = OrderedDict()

    def list(self) -> list[dict[str, Any]]:
        """The newest first."""
        self._search()
        newest = sorted(self._found.items(), key=lambda item: -_changed(item[1]))[:MOST_LISTED]
        return [{"id": name, **WatchedRun(path).head()} for name, path in newest]

    def find(self, name: str) -> WatchedRun:
        """KeyError where there is none of that name."""
        with self._lock:
            held = self._held.get(name)
            if held is not None and held.born == born(held.path):
                self._held.move_to_end(name)
                return self._held[name]
        if name not in self._found:
            self._search()
        path = self._found[name]
        with self._lock:
            run = self._held[name] = WatchedRun(path)
            while len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
            return run

    def _search(self) -> None:
        found: dict[str, Path] = {}
        for root in self._paths:
            for path in _runs_in(root, DEPTH):
                name = path.name if path == root else path.relative_to(root).as_posix()
                unique, number = name, 2
                while unique in found and found[unique] != path:  # two folders may have runs of one name
                    unique, number = f"{name} ({number})", number + 1
                found[unique] = path
        self._found = found


def _runs_in(path: Path, depth: int) -> Iterator[Path]:
    if (path / CONFIG).is_file():
        if "env" in read_or_empty(path / CONFIG):
            yield path
    elif depth > 0 and path.is_dir():
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
                yield from _runs_in(folder, depth - 1)


def _changed(path: Path) -> float:
    metrics = path / "metrics.jsonl"
    try:
        return (metrics if metrics.exists() else path / CONFIG).stat().st_mtime
    except OSError:
        return 0.0
