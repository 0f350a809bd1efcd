"""A recorded run re-enacted in this process: which steps each update learned from is in its ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freerun.collectors.replayed import Recorded, Replayed
from freerun.config import TrainConfig
from freerun.core import Algorithm, AnySegment, Array, Demand, Metrics, UserError
from freerun.making import make_algorithm, make_factory
from freerun.persistence import checkpoint, origin
from freerun.persistence.files import MOST_JSON_BYTES, read_json
from freerun.persistence.run_folder import CONFIG, POLICY, SUMMARY, read_policy
from freerun.persistence.secrecy import refuse_hidden
from freerun.registry import make_config
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.training import train


@dataclass(frozen=True)
class Reenactment:
    """What came of it."""

    num_updates: int
    num_steps: int
    compared: list[int]
    """Updates after which the run had kept its weights."""
    first_difference: int | None
    """The first of them with other weights."""
    weights: Array

    @property
    def is_same(self) -> bool:
        return self.first_difference is None

    def __str__(self) -> str:
        done = f"{self.num_updates:,} updates from {self.num_steps:,} steps re-enacted"
        if not self.compared:
            return f"{done}; the run has kept no weights to compare with"
        if self.first_difference is not None:
            return f"{done}: after update {self.first_difference} the weights are others than those that the run kept"
        return f"{done}: the same weights as in the run, bit for bit (compared after {len(self.compared)} updates)"


def replay(run_dir: str | Path, until_update: int | None = None, trust: Sequence[str] = ()) -> Reenactment:
    """The whole run again; with `until_update`, a debugger opens before that update."""
    folder = Path(run_dir)
    options = read_json(folder / CONFIG)
    origin.check(options, folder, trust)
    refuse_hidden(options)
    config = make_config(options)
    record = read_ledger(folder / "ledger.jsonl")
    _check(config, record)
    if until_update is not None and not 1 <= until_update <= len(record):
        raise UserError(f"--until-update must lie between 1 and {len(record)}, not {until_update}")
    factory = make_factory(config)
    algorithm = _Reenacted(make_algorithm(config, factory), until_update)
    collector = Replayed(factory, algorithm.policy, config.seed, record)
    ledger = Ledger()
    kept = _Kept(_kept_weights(folder), algorithm)
    try:
        train(algorithm, collector, _Course(record), ledger, [kept])
    finally:
        collector.close()
    return Reenactment(ledger.version, ledger.steps, kept.compared, kept.first_difference, algorithm.policy.weights)


def read_ledger(path: Path) -> list[Recorded]:
    """Every line of it, checked: a folder may come from anywhere."""
    if not path.is_file():
        raise UserError(f"{path} is missing: name the folder of a run that freerun has trained")
    record: list[Recorded] = []
    with path.open("rb") as file:
        while line := file.readline(MOST_JSON_BYTES):
            try:
                content = json.loads(line)
                segments = content["segments"]
                pieces = [piece for columns in segments for column in columns for piece in column]
                if not all(len(piece) == 3 and all(type(part) is int for part in piece) for piece in pieces):
                    raise ValueError("a piece that is none")
                if any(not num_steps > 0 for _, num_steps, _ in pieces) or content["update"] != len(record) + 1:
                    raise ValueError("a gap")
                record.append(Recorded(content["update"], float(content["progress"]), segments))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"line {len(record) + 1} of {path} is not one that freerun wrote") from None
    if not record:
        raise UserError(f"{path} is empty: the run ended before its first update")
    return record


def _check(config: TrainConfig[Any, Any], record: Sequence[Recorded]) -> None:
    """Whether the same steps can be had again to the last bit."""
    if not all(recorded.segments for recorded in record):
        raise UserError("a run on environments that are tensors cannot be replayed: its episodes have no numbers")
    if config.num_learners > 1:
        raise UserError("a run of several learners cannot be replayed bit for bit: one adds gradients up otherwise")
    if config.num_learners > 1:
        raise UserError("a run of several learners cannot be replayed: their gradients are summed in another order")
    if getattr(config.algorithm, "stages", None) == "concurrent":
        raise UserError("MBPO with --stages concurrent cannot be replayed: its stages meet by the clock")
    lanes = max(len(columns) for recorded in record for columns in recorded.segments)
    together = getattr(config.collector, "envs_per_worker", 1) if config.mode != "sync" else config.num_workers or 1
    if max(lanes, together) > 1 and not config.deterministic:
        raise UserError(
            "this run's policy acted on several observations at once, which rounds otherwise than one by one: only "
            "runs with one environment per worker, or with --deterministic, can be replayed bit for bit"
        )


def _kept_weights(folder: Path) -> dict[int, Path]:
    """Where the run has kept its policy, by update."""
    found = {int(name.partition("-")[2]): checkpoint.folder_of(folder) / name for name in checkpoint.names(folder)}
    paths = {update: path / POLICY for update, path in found.items() if update > 0}
    if (folder / POLICY).is_file() and (folder / SUMMARY).is_file():
        updates = read_json(folder / SUMMARY).get("updates")
        if isinstance(updates, int):
            paths[updates] = folder / POLICY
    return paths


class _Course(Budget):
    """As far as the run had come before each of its updates."""

    def __init__(self, record: Sequence[Recorded]):
        super().__init__(None, None)
        object.__setattr__(self, "_record", record)

    _record: Sequence[Recorded]

    def progress(self, ledger: Ledger) -> float:
        return self._record[ledger.version].progress if ledger.version < len(self._record) else 1.0


class _Reenacted:
    """The algorithm, which takes what the record has for it instead of what it would demand."""

    def __init__(self, algorithm: Algorithm, until_update: int | None):
        self._algorithm = algorithm
        self._until_update = until_update
        self.policy = algorithm.policy

    def demand(self) -> Demand:
        return Demand()

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._algorithm.observe(segments)

    def update(self, version: int, progress: float) -> Metrics:
        if version + 1 == self._until_update:
            print(f"Stopped before update {version + 1}: `step` leads into it, `continue` re-enacts the rest.")
            breakpoint()  # noqa: T100
        return self._algorithm.update(version, progress)

    def state_dict(self) -> dict[str, Any]:
        return self._algorithm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._algorithm.load_state_dict(state)


class _Kept:
    """A sink that compares the weights with those that the run has kept."""

    def __init__(self, paths: dict[int, Path], algorithm: _Reenacted):
        self._paths = paths
        self._algorithm = algorithm
        self.compared: list[int] = []
        self.first_difference: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        update = int(metrics["update"])
        path = self._paths.get(update)
        if path is None or not path.is_file():
            return
        theirs, _ = read_policy(path)
        ours = self._algorithm.policy.arrays
        same = theirs.keys() == ours.keys() and all(np.array_equal(theirs[name], ours[name]) for name in ours)
        self.compared.append(update)
        if not same and self.first_difference is None:
            self.first_difference = update

    def close(self) -> None:
        """Nothing is held."""
