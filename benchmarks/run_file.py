"""Finished runs of a benchmark in one JSON file, with what they ran on: an interrupted benchmark continues from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

Record = TypeVar("Record")


class RunFile(Generic[Record]):
    """Finished runs, as dataclasses, and what went wrong."""

    def __init__(self, path: Path, kind: type[Record]):
        self.path = path
        self.records: list[Record] = []
        self.failures: list[dict[str, Any]] = []
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.records = [kind(**record) for record in content["runs"]]
            self.failures = content["failures"]

    def save(self) -> None:
        """All or nothing: whoever is interrupted loses no earlier run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        runs = [asdict(record) for record in self.records]  # type: ignore[call-overload]
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"runs": runs, "failures": self.failures}) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def replace(self, record: Record, *names: str) -> None:
        """Keep a finished run instead of an earlier one that has the same values of these fields, and save."""
        same = [getattr(record, name) for name in names]
        self.records = [one for one in self.records if [getattr(one, name) for name in names] != same]
        self.records.append(record)
        self.save()


def others_beside(records: Sequence[Any]) -> str:
    """Say whether something else used the machine while these runs took their time; each knows whether it was alone."""
    if all(record.alone for record in records):
        return "Nothing else ran on the machine."
    return "Others may have used the machine at the same time, so the seconds are no measure of speed."


def versions() -> dict[str, str]:
    """Of what can change a score; freerun with a fingerprint of its source, which changes between versions."""
    import freerun

    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium", "mujoco", "box2d", "stable-baselines3"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    digest = hashlib.sha256()
    for path in sorted(Path(freerun.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    found["freerun"] = f"{freerun.__version__} (source {digest.hexdigest()[:8]})"
    return found
