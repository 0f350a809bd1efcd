"""The folder of a search: its settings, and one line of JSON for each finished training."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from freerun.core import UserError
from freerun.persistence.files import parse_json, read_json, write_atomically, write_json
from freerun.tools.workflow_search.order_model import OrderTrial
from freerun.tools.workflow_search.precedence import ORDERS

SETTINGS, TRAININGS = "search.json", "trainings.jsonl"
SCORE = "trial_return"
"""The figure of a training that is its score: the mean return of fresh episodes, without the reward for compliance."""
NEEDED: dict[str, type | UnionType] = {
    "trial": int,
    "order": str,
    "seed": int,
    "run": str,
    SCORE: float | int,
    "compliance": float | int,
    "wall_seconds": float | int,
}
"""What the search itself reads from a line, and of which kind it must be."""


@dataclass
class SearchFolder:
    """A search on disk. It is written after every training, so a kill costs only those that are under way."""

    path: Path
    seeds_per_trial: int
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The finished trainings, in the order in which they ended."""

    @classmethod
    def open(cls, path: Path, seeds_per_trial: int, budget_trials: int, settings: Mapping[str, Any]) -> SearchFolder:
        """Begin a search in a new folder, or continue the search of the same settings that the folder holds."""
        known = json.loads(json.dumps(settings))  # a file has lists where settings have tuples
        if (path / SETTINGS).exists() and {**read_json(path / SETTINGS), **known} != read_json(path / SETTINGS):
            raise UserError(f"{path} holds a search with other settings: name another --run-dir")
        write_json(path / SETTINGS, {**known, "budget_trials": budget_trials})
        return cls(path, seeds_per_trial, read_trainings(path))

    def add(self, line: dict[str, Any]) -> None:
        """Add a finished training. The file is replaced as a whole, so that no kill leaves half a line."""
        self.lines.append(line)
        content = "".join(json.dumps(line) + "\n" for line in self.lines)
        write_atomically(self.path / TRAININGS, content.encode())

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The trainings of trials, without the one that only shows the effect of --warm-start."""
        return [line for line in self.lines if line["trial"] >= 0]

    def trials(self) -> dict[int, list[dict[str, Any]]]:
        """Return the trainings of each trial by its number."""
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self.counted:
            found[line["trial"]].append(line)
        return dict(sorted(found.items()))

    def finished(self) -> list[OrderTrial]:
        """Return the trials of which all trainings are finished, with their mean scores."""
        whole = [lines for lines in self.trials().values() if len(lines) >= self.seeds_per_trial]
        return [
            OrderTrial(ORDERS.index(lines[0]["order"]), sum(line[SCORE] for line in lines) / len(lines))
            for lines in whole
        ]


def read_trainings(folder: Path) -> list[dict[str, Any]]:
    """Read the finished trainings of a search."""
    path = folder / TRAININGS
    try:
        lines = [parse_json(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for line in lines:
        is_whole = isinstance(line, dict) and all(isinstance(line.get(name), kind) for name, kind in NEEDED.items())
        if not is_whole or line["order"] not in ORDERS:
            raise UserError(f"{path} is not a list of trainings that freerun wrote")
    return lines
