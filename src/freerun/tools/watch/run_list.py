"""The runs that the page may show: those inside the folders that were named, and no others."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freerun.persistence.run_folder import without_seed
from freerun.tools.watch.watched_run import CONFIG, WatchedRun, began_at, read_or_empty

MOST_IN_MEMORY = 16
"""The number of runs whose curves and timelines stay in memory. Others are read again when the page asks for them."""
MOST_LISTED = 500
SEARCH_DEPTH = 2
"""A folder of runs may hold folders of runs, as workflows make them."""
HEADLINE = ("env", "algo", "mode", "num_workers")
"""The settings that the page names for every run."""
TRIALS = "trials.json"
"""The file in which a sweep lists its trials, in the folder that holds their runs."""
MOST_SETTINGS = 20
MOST_CHARACTERS = 60


class RunList:
    """Finds the runs, and keeps those in memory that were asked for last. Its methods may be called from any thread."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = [path.absolute() for path in paths]
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._in_memory: OrderedDict[str, WatchedRun] = OrderedDict()

    def list(self) -> list[dict[str, Any]]:
        """Describe all runs, the one that began last first, so that the order stays the same while runs continue."""
        self._search()
        newest = sorted(self._found.items(), key=lambda item: -began_at(item[1]))[:MOST_LISTED]
        groups = group_runs({name: read_or_empty(path / CONFIG) for name, path in newest})
        return [
            {"id": name, **WatchedRun(path).headline(), "group": groups[name].key, "settings": groups[name].settings}
            for name, path in newest
        ]

    def find(self, name: str) -> WatchedRun:
        """Return the run with this name; raise KeyError if there is none."""
        with self._lock:  # two requests must not reorder the runs in memory at the same time
            run = self._in_memory.get(name)
            # Another run may have taken over the folder; then everything is read again.
            if run is not None and run.began_at == began_at(run.path):
                self._in_memory.move_to_end(name)
                return run
        if name not in self._found:
            self._search()
        path = self._found[name]
        with self._lock:
            run = self._in_memory[name] = WatchedRun(path)
            while len(self._in_memory) > MOST_IN_MEMORY:
                self._in_memory.popitem(last=False)  # the one that was not asked for the longest
            return run

    def sweep_of(self, run: WatchedRun) -> dict[str, Any] | None:
        """Return the trials of the sweep that a run belongs to; None if it belongs to none that may be shown."""
        folder = run.path.parent
        if not any(folder.is_relative_to(path) for path in self._paths):
            return None
        found = read_or_empty(folder / TRIALS)
        return found if isinstance(found.get("trials"), list) and isinstance(found.get("vary"), list) else None

    def _search(self) -> None:
        found: dict[str, Path] = {}
        for root in self._paths:
            for path in _runs_in(root, SEARCH_DEPTH):
                name = path.name if path == root else path.relative_to(root).as_posix()
                unique, number = name, 2
                while unique in found and found[unique] != path:  # two folders may hold runs with the same name
                    unique, number = f"{name} ({number})", number + 1
                found[unique] = path
        self._found = found  # replaced as a whole, so that other threads need no lock to read it


def _runs_in(path: Path, depth: int) -> Iterator[Path]:
    if (path / CONFIG).is_file():
        if "env" in read_or_empty(path / CONFIG):
            yield path
    elif depth > 0 and path.is_dir():
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
                yield from _runs_in(folder, depth - 1)


# ---------------------------------------------------------------------------------------------- seeds of one setting


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed."""

    key: str
    settings: list[str]
    """`name=value` for each setting in which groups with the same headline settings differ."""


def group_runs(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, SeedGroup]:
    """Return the group of each run."""
    shared = {run: {name: json.dumps(value) for name, value in without_seed(configs[run]).items()} for run in configs}
    # The hash of all settings but the seed: equal settings give the same key on every request.
    keys = {
        run: hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        for run, settings in shared.items()
    }
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for run, settings in shared.items():
        alike.setdefault(tuple(settings.get(name) for name in HEADLINE), []).append(run)
    groups: dict[str, SeedGroup] = {}
    for runs in alike.values():
        names = dict.fromkeys(name for run in runs for name in shared[run])
        # Only what differs between runs that would look the same otherwise; the page has room for a few.
        differing = [name for name in names if len({shared[run].get(name) for run in runs}) > 1][:MOST_SETTINGS]
        for run in runs:
            texts = [f"{name}={shared[run].get(name, 'null')[:MOST_CHARACTERS]}" for name in differing]
            groups[run] = SeedGroup(keys[run][:16], texts)
    return groups
