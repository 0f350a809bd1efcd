"""Result files of benchmarks. They keep what was measured before, and each row carries a stamp of its measurement.

A stamp says when, on which machine, with which versions and beside what a row was measured, and has a fingerprint of
the sources that the row depends on (`catalogue.py` declares them). Rows from before there were stamps have none.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from catalogue import fingerprint, sources_of

from freerun.tools.bench.load_meter import LoadMeter, adopt_orphans, num_cores, processor

Record = TypeVar("Record")
Stamp = dict[str, Any]
Stamped = list[tuple[str, Stamp | None]]
"""The names of rows, each with the stamp of its measurement, if there is one."""
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:
    adopt_orphans()  # a benchmark is run; tests import this module, too, and must not change whose child an orphan is
METER = LoadMeter()
"""Measures what else runs on the machine, from the start of the benchmark on."""
ENVELOPE = {"content", "stamps"}
MAX_NAME_LENGTH = 40
"""A longer text of a record is no part of its name: a log, or a list of settings."""


class ResultFile:
    """One JSON value with the results of a benchmark, and a stamp for each of its rows.

    Change `content`, then save it and name the rows that were measured. All other rows stay as they are.
    """

    def __init__(self, path: Path, empty: Any, rows: Callable[[Any], Iterable[str]] = list):
        """`empty` is the content of a file that is not there; `rows` names the rows of a content (its keys)."""
        self.path, self._rows = path, rows
        self.content, self._stamps = _read(path) if path.exists() else (empty, {})

    def save(self, *measured: str) -> None:
        """Write the file as a whole, so that an interruption loses no earlier row, and stamp what was just measured."""
        self._stamps.update(stamps(self.path, measured))
        _write(self.path, {"content": self.content, "stamps": dict(self.stamped())}, indent=1)

    def is_current(self, row: str) -> bool:
        """Return whether a row was measured with today's sources, so that further runs may be added to it."""
        known = self._stamps.get(row)
        return known is not None and known["sources"] == fingerprint(sources_of(self.path, row))

    def stamped(self) -> Stamped:
        return [(row, self._stamps.get(row)) for row in self._rows(self.content)]


class RunFile(Generic[Record]):
    """Finished runs, as dataclasses with a stamp each, and what went wrong."""

    def __init__(self, path: Path, kind: type[Record]):
        self.path = path
        self.records: list[Record] = []
        self.failures: list[dict[str, Any]] = []
        # By identity, because records need not be hashable; the record is kept, so that no other one gets its identity.
        self._stamps: dict[int, tuple[Record, Stamp | None]] = {}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.failures = content["failures"]
            for fields in content["runs"]:
                known = fields.pop("stamp", None)
                record = kind(**fields)
                self.records.append(record)
                self._stamps[id(record)] = (record, known)

    def save(self) -> None:
        """All or nothing: whoever is interrupted loses no earlier run. Runs that are new get a stamp."""
        new = [record for record in self.records if id(record) not in self._stamps]
        of_new = stamps(self.path, [_name(vars(record)) for record in new])
        self._stamps.update((id(record), (record, of_new[_name(vars(record))])) for record in new)
        runs = []
        for record in self.records:
            _, known = self._stamps[id(record)]
            fields = asdict(record)  # type: ignore[call-overload]
            runs.append(fields | {"stamp": known} if known else fields)
        _write(self.path, {"runs": runs, "failures": self.failures})

    def replace(self, record: Record, *names: str) -> None:
        """Keep a finished run instead of an earlier one that has the same values of these fields, and save."""
        same = [getattr(record, name) for name in names]
        self.records = [one for one in self.records if [getattr(one, name) for name in names] != same]
        self.records.append(record)
        self.save()

    def is_current(self, record: Record) -> bool:
        """Return whether a run was measured with today's sources, so that it need not be measured again."""
        _, known = self._stamps.get(id(record), (record, None))
        return known is not None and known["sources"] == fingerprint(sources_of(self.path, _name(vars(record))))

    def stamped(self) -> Stamped:
        return [(_name(vars(record)), self._stamps.get(id(record), (record, None))[1]) for record in self.records]


def read_content(path: Path) -> Any:
    """Return the content of a result file, with or without stamps."""
    return _read(path)[0]


def stamps_in(path: Path) -> Stamped:
    """Return what a result file says of its rows, whichever class wrote it."""
    content, stamps = _read(path)
    if isinstance(content, dict) and {"runs", "failures"} == set(content):
        return [(_name(run), run.get("stamp")) for run in content["runs"]]
    return list(stamps.items()) or [("all", None)]


def stamps(path: Path, rows: Iterable[str]) -> dict[str, Stamp]:
    """Return the conditions of a measurement that has just been made for these rows of a result file."""
    conditions_now = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "cores": num_cores(),
        "gpu": _gpu(),
        "others_percent": round(METER.read().others, 1),
        "versions": versions(),
    }
    return {row: {**conditions_now, "sources": fingerprint(sources_of(path, row))} for row in rows}


def add_stamp(source: Path, target: Path, row: str) -> None:
    """Copy a report of `freerun bench`, with a stamp."""
    _write(target, {**json.loads(source.read_text(encoding="utf-8")), "stamps": stamps(target, [row])}, indent=1)


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], *names: str) -> None:
    """Refuse to write results beside others, or in their place, that were measured with other settings."""
    for name in names if before else ():
        if before[name] != now[name]:
            raise SystemExit(
                f"The results that are there have {name} {before[name]}, these have {now[name]}: give another --output."
            )


def merge(before: dict[str, Any], now: dict[str, Any], part: str, *same: str) -> dict[str, Any]:
    """Return `now` with those entries of its part that only an earlier call measured, under the same settings."""
    refuse_other_settings(before, now, *same)
    return {**before, **now, part: {**before.get(part, {}), **now[part]}}


def write_report(path: Path, text: str, *stamped: Stamped) -> str:
    """Write the page of a result: its text, and under which conditions each of its rows was measured."""
    page = f"{text.rstrip()}\n\n{conditions([pair for pairs in stamped for pair in pairs])}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return page


def conditions(stamped: Stamped) -> str:
    """Say when, where and beside what the rows were measured: a table with a line for rows that have this in common."""
    alike: dict[tuple[str, ...], list[tuple[str, Stamp]]] = {}
    for name, known in stamped:
        if known is not None:
            machine = ", ".join(part for part in (known["processor"], f"{known['cores']} cores", known["gpu"]) if part)
            versions = ", ".join(f"{key} {value}" for key, value in known["versions"].items() if value != "absent")
            alike.setdefault((known["date"], machine, versions, known["sources"]), []).append((name, known))
    lines = []
    if alike:
        lines = ["| rows | measured | machine | others used of it | versions | sources |", "| --- " * 6 + "|"]
    for (date, machine, versions, sources), rows in alike.items():
        shares = [known["others_percent"] for _, known in rows]
        others = f"{min(shares):g} – {max(shares):g} %" if min(shares) < max(shares) else f"{shares[0]:g} %"
        lines.append(f"| {_names(name for name, _ in rows)} | {date} | {machine} | {others} | {versions} | {sources} |")
    if unknown := [name for name, known in stamped if known is None]:
        which = _names(unknown) if alike else "these rows"
        words = (
            f"No stamp (date, machine, other programs, sources), because they are older: {which}. Others may have used "
            "the machine, so seconds of different rows may not be comparable."
        )
        lines += ["", words] if alike else [words]
    return "\n".join(lines)


def others_beside(records: Sequence[Any]) -> str:
    """Say whether something else used the machine while these runs took their time; each knows whether it was alone."""
    if all(record.alone for record in records):
        return "No other benchmark ran at the same time."
    return "Others may have used the machine at the same time, so the seconds are no measure of speed."


def versions() -> dict[str, str]:
    """Return the versions of what can change a result; freerun's with a fingerprint of its whole source."""
    import freerun

    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium", "mujoco", "box2d", "stable-baselines3"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["freerun"] = f"{freerun.__version__} (source {fingerprint(('src/freerun',))})"
    return found


def _read(path: Path) -> tuple[Any, dict[str, Stamp | None]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and set(content) == ENVELOPE:
        return content["content"], content["stamps"]
    # A report of `freerun bench` has a form of its own, with room for more entries.
    return content, content.get("stamps", {}) if isinstance(content, dict) else {}


def _write(path: Path, value: Any, indent: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    temporary.replace(path)


def _name(fields: dict[str, Any]) -> str:
    """Name a run by those of its fields that are short texts: its task and system, but not its seed or its scores."""
    texts = [text for text in fields.values() if isinstance(text, str) and 0 < len(text) <= MAX_NAME_LENGTH]
    return ", ".join(texts) or "run"


def _names(names: Iterable[str]) -> str:
    return "; ".join(f"{name} × {number}" if number > 1 else name for name, number in Counter(names).items())


def _gpu() -> str:
    torch = sys.modules.get("torch")  # a benchmark that has not loaded it has not used a GPU either
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else ""
