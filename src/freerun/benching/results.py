"""What was measured, in one file: `report.json`. An interrupted bench goes on from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freerun.benching.job import BARE
from freerun.benching.options import BenchOptions
from freerun.core import UserError
from freerun.persistence.files import read_json, write_atomically

FILE_NAME = "report.json"
SEQUENTIAL = "sequential"
MAY_CHANGE = ("modes", "workers", "repeats", "max_minutes", "output")
"""Settings that a bench may go on with; the others are what its figures were measured with."""


@dataclass
class Case:
    """A mode with so many workers, or the bare limit: a line of the table."""

    label: str
    num_workers: int
    steps_per_update: int = 0
    runs: list[dict[str, float]] = field(default_factory=list)
    problem: str | None = None
    """Why it has no runs, or fewer than others."""

    @property
    def name(self) -> str:
        return f"{self.label} × {self.num_workers}"

    @property
    def is_bare(self) -> bool:
        return self.label == BARE

    @property
    def picture(self) -> str:
        return f"{self.name.replace(' × ', '-').replace(':', '-').replace('=', '')}.png"

    def values(self, name: str) -> list[float]:
        return [run[name] for run in self.runs]


@dataclass
class Results:
    options: BenchOptions
    machine: dict[str, Any]
    cases: list[Case]
    outcome: str = "interrupted"
    """finished, interrupted or out of time."""
    seconds: float = 0.0
    """That it took, all sittings together."""
    date: str = ""

    @property
    def any_runs(self) -> bool:
        return any(case.runs for case in self.cases)

    def case(self, label: str, num_workers: int) -> Case | None:
        return next((case for case in self.cases if (case.label, case.num_workers) == (label, num_workers)), None)

    def of(self, num_workers: int) -> list[Case]:
        """What was measured with so many workers, and sequential beside it."""
        return [
            case
            for case in self.cases
            if case.runs and not case.is_bare and (case.num_workers == num_workers or case.label == SEQUENTIAL)
        ]

    def write(self, folder: Path, further: dict[str, Any] | None = None) -> None:
        options = {**asdict(self.options), "output": None}
        content = {**vars(self), "options": options, "cases": [asdict(case) for case in self.cases], **(further or {})}
        try:
            write_atomically(folder / FILE_NAME, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f"cannot write {folder / FILE_NAME}: {error.strerror}") from None

    @classmethod
    def read(cls, folder: Path) -> Results:
        found = read_json(folder / FILE_NAME)
        try:
            options = BenchOptions(**found["options"])
            cases = [Case(**case) for case in found["cases"]]
            return cls(options, found["machine"], cases, found["outcome"], found["seconds"], found["date"])
        except (KeyError, TypeError):
            raise UserError(f"{folder / FILE_NAME} is not a report of freerun bench") from None


def check_changes(before: BenchOptions, now: BenchOptions) -> None:
    """Figures of another kind of work are not to be mixed."""
    for each in dataclasses.fields(BenchOptions):
        old, new = getattr(before, each.name), getattr(now, each.name)
        if each.name not in MAY_CHANGE and old != new:
            flag = "ENV" if each.name == "env" else f"--{each.name.replace('_', '-')}"
            raise UserError(f"this bench was measured with {flag} {old}: leave it as it is, or start another bench")
