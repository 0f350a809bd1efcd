"""The results of a bench in one file, `report.json`. An interrupted bench continues from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freerun.core import UserError
from freerun.persistence.files import read_json, write_atomically
from freerun.persistence.redaction import without_secrets
from freerun.settings.registry import reference_mode
from freerun.tools.bench.bench_job import BARE, Job
from freerun.tools.bench.bench_options import BenchOptions, read_mode

FILE_NAME = "report.json"
SEQUENTIAL = reference_mode()
"""The mode that others are compared with."""
MAY_CHANGE = ("modes", "workers", "num_envs", "repeats", "max_minutes", "output")
"""The settings that may differ when a bench is resumed. Another value of any other would make figures incomparable."""


@dataclass
class Case:
    """One thing to measure: a mode, or the bare limit, with a number of workers or of environments that are tensors."""

    label: str
    num_workers: int
    steps_per_update: int = 0
    runs: list[dict[str, float]] = field(default_factory=list)
    problem: str | None = None
    """The reason why it has no runs, or fewer than other cases."""

    @property
    def name(self) -> str:
        return f"{self.label} × {self.num_workers}"

    @property
    def is_bare(self) -> bool:
        return self.label == BARE

    @property
    def picture(self) -> str:
        """The file name of its timeline."""
        return f"{self.name.replace(' × ', '-').replace(':', '-').replace('=', '')}.png"

    def values(self, name: str) -> list[float]:
        """Return one figure of all runs."""
        return [run[name] for run in self.runs]


@dataclass
class Results:
    """All cases of a bench with their runs, and the machine they were measured on."""

    options: BenchOptions
    machine: dict[str, Any]
    cases: list[Case]
    outcome: str = "interrupted"
    """`finished`, `interrupted` or `out of time`."""
    seconds: float = 0.0
    """How long it took, including the time before it was resumed."""
    date: str = ""

    @property
    def any_runs(self) -> bool:
        return any(case.runs for case in self.cases)

    def case(self, label: str, num_workers: int) -> Case | None:
        """Return the case with this label and number of workers, if there is one."""
        return next((case for case in self.cases if (case.label, case.num_workers) == (label, num_workers)), None)

    def measured_with(self, num_workers: int) -> list[Case]:
        """Return the modes that have runs with this number of workers, and `sequential`, which always has one."""
        return [
            case
            for case in self.cases
            if case.runs and not case.is_bare and (case.num_workers == num_workers or case.label == SEQUENTIAL)
        ]

    @property
    def episode_steps(self) -> float:
        """The length of an episode with random actions. The first run decides, so that all runs do the same work."""
        first_runs = self.cases[0].runs  # of the bare limit with the lowest number
        return first_runs[0]["episode_steps"] if first_runs else 1.0

    def job(self, case: Case) -> Job:
        """Return what to run for a mode; the bare limit has a job of its own."""
        mode, settings = read_mode(case.label)
        return Job(
            self.options.env,
            mode,
            case.num_workers,
            self.options.seconds,
            case.steps_per_update,
            max(1, round(case.steps_per_update / self.episode_steps)),  # the same work in whole episodes
            self.options.num_epochs,
            self.options.env_args,
            self.options.max_episode_steps,
            settings,
            device=self.options.device,
            is_tensors=self.options.is_tensors,
        )

    def write(self, folder: Path, further: dict[str, Any] | None = None) -> None:
        """Write `report.json`; `further` adds entries that are not read back."""
        # The folder may be moved or sent to somebody, so its path is not part of the report.
        options = without_secrets({**asdict(self.options), "output": None})
        content = {**vars(self), "options": options, "cases": [asdict(case) for case in self.cases], **(further or {})}
        try:
            # Atomically, because a bench may be killed at any time and must be able to continue.
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
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{folder / FILE_NAME} is not a report of freerun bench") from None


def check_changes(before: BenchOptions, now: BenchOptions) -> None:
    """Refuse to resume a bench with settings that would mix figures of different work."""
    # As they stand in files: a secret that was given again cannot be compared with the one that no file keeps.
    old_options, new_options = (without_secrets(asdict(options)) for options in (before, now))
    for each in dataclasses.fields(BenchOptions):
        old, new = old_options[each.name], new_options[each.name]
        if each.name not in MAY_CHANGE and old != new:
            flag = "ENV" if each.name == "env" else f"--{each.name.replace('_', '-')}"
            raise UserError(f"this bench was measured with {flag} {old}: leave it as it is, or start another bench")
