"""Replays a recorded run in this process. Its ledger says which steps each update learned from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freerun.adapters.tensor_envs import TensorEnvs, is_only_tensors
from freerun.algorithms.learners.learning_tunables import LEARNING_TUNABLES
from freerun.collecting.rollouts.replay_collector import RecordedSegment, RecordedUpdate, ReplayCollector
from freerun.core import (
    Algorithm,
    AnySegment,
    Array,
    Collector,
    Demand,
    FollowingAlgorithm,
    Metrics,
    Policy,
    UserError,
)
from freerun.persistence import checkpoint
from freerun.persistence.files import MOST_JSON_BYTES, read_json
from freerun.persistence.metric_records import read_records
from freerun.persistence.run_folder import CONFIG, METRICS, POLICY, SUMMARY, read_policy
from freerun.run import init_from
from freerun.run.learner_threads import METRIC as LEARNER_THREADS
from freerun.settings.config import AnyConfig
from freerun.settings.factories import (
    acceleration,
    computed_by,
    has_open_threads,
    is_tensors,
    make_algorithm,
    make_envs,
    run_seed,
    set_learner_threads,
)
from freerun.settings.named_code import trusted_config
from freerun.settings.registry import find_algorithm, find_mode
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.training import train
from freerun.tuning.live_tuner import FILE_NAME as ADAPTING


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found."""

    num_updates: int
    num_steps: int
    compared: list[int]
    """The updates whose weights the run had saved."""
    first_difference: int | None
    """The first update whose weights differ; None if all are the same."""
    weights: Array

    @property
    def is_same(self) -> bool:
        return self.first_difference is None

    def __str__(self) -> str:
        done = f"{self.num_updates:,} updates from {self.num_steps:,} steps replayed"
        if not self.compared:
            return f"{done}; the run has saved no weights to compare with"
        if self.first_difference is not None:
            return f"{done}: after update {self.first_difference} the weights differ from those that the run saved"
        return f"{done}: the same weights as in the run, bit for bit (compared after {len(self.compared)} updates)"


def replay(run_dir: str | Path, until_update: int | None = None, trust: Sequence[str] = ()) -> ReplayResult:
    """Replay the whole run. With `until_update`, a debugger opens before that update."""
    folder = Path(run_dir)
    config = trusted_config(read_json(folder / CONFIG), folder, trust)
    record = read_ledger(folder / "ledger.jsonl")
    if (folder / SUMMARY).is_file() and read_json(folder / SUMMARY).get("changed_by_callbacks"):
        raise UserError(
            f"{folder} cannot be replayed: its callbacks have changed settings, and the ledger does not say when"
        )
    _check(config, record, _adapted(folder))
    if until_update is not None and not 1 <= until_update <= len(record):
        raise UserError(f"--until-update must lie between 1 and {len(record)}, not {until_update}")
    factory = make_envs(config)
    # The algorithm starts with the same weights as in the run: they depend on the seed of the run alone.
    made = make_algorithm(config, factory)
    if config.init_from is not None:
        learned = init_from.find(config.init_from)
        init_from.start(made, learned, factory.spaces, config)
    before_update = _what_the_clock_decided(config, folder, made, len(record))
    algorithm = _ReplayedAlgorithm(made, until_update, before_update)
    collector: Collector
    if isinstance(factory, TensorEnvs):
        collector = _tensor_replay(config, factory, algorithm.policy, record)
    else:
        collector = ReplayCollector(factory, algorithm.policy, run_seed(config), record)
    ledger = Ledger()
    comparison = _WeightComparison(_saved_policies(folder), algorithm)
    try:
        # The same loop as in the run. Only what it collects, and how far it thinks it has come, is recorded.
        train(algorithm, collector, _RecordedProgress(record), ledger, [comparison])
    finally:
        collector.close()
    return ReplayResult(
        ledger.version, ledger.steps, comparison.compared, comparison.first_difference, algorithm.policy.weights
    )


def _tensor_replay(config: AnyConfig, first: TensorEnvs, policy: Policy, record: Sequence[RecordedUpdate]) -> Collector:
    """The simulators of the run, made again as often as they were: at its beginning and when it was resumed."""
    from freerun.collecting.tensors.tensor_replay import TensorReplay
    from freerun.collecting.tensors.tensor_rollout import TensorRollout, make_rollouts

    ready = [first]  # the algorithm was made for these: they are used first

    def make() -> list[TensorRollout]:
        made = ready.pop() if ready else make_envs(config)
        assert isinstance(made, TensorEnvs)
        envs = made.envs
        return make_rollouts(envs, policy, config.seed, config.collector.num_steps_per_env, acceleration(config))

    return TensorReplay(make, [update.tensors for update in record])


def _what_the_clock_decided(
    config: AnyConfig, folder: Path, algorithm: Algorithm, num_updates: int
) -> Callable[[int], None]:
    """Return what sets the algorithm, before each update, to how it was in the run; the metrics of the run say it."""
    has_stages = find_algorithm(config.algo).traits.has_stages and config.algorithm.stages == "concurrent"
    # The kernel's threads change no result.
    has_threads = has_open_threads(config, algorithm) and computed_by(config, algorithm) != "kernel"
    if has_stages and not isinstance(algorithm, FollowingAlgorithm):
        raise UserError(
            f"--algo {config.algo} with --stages concurrent cannot be replayed: its stages meet by the clock, and it "
            "has no method `follow`"
        )
    found: list[Metrics] = []
    if has_stages or has_threads:
        records = read_records(folder / METRICS)
        found = [{name: value for name, value in one.items() if value is not None} for one in records]
        if len(found) < num_updates:
            raise UserError(
                f"{folder / METRICS} has {len(found)} updates and the ledger {num_updates}: a line is missing"
            )

    def before_update(version: int) -> None:
        if has_stages and isinstance(algorithm, FollowingAlgorithm):
            algorithm.follow(found[version])
        if has_threads:
            set_learner_threads(config, algorithm, int(found[version].get(LEARNER_THREADS, 1)))

    return before_update


def read_ledger(path: Path) -> list[RecordedUpdate]:
    """Read and check every line of a ledger. The folder may come from anywhere."""
    if not path.is_file():
        raise UserError(f"{path} is missing: name the folder of a run that freerun has trained")
    record: list[RecordedUpdate] = []
    with path.open("rb") as file:
        # The limit protects against a file that is one endless line.
        while line := file.readline(MOST_JSON_BYTES):
            try:
                content = json.loads(line)
                segments = content["segments"]
                pieces = [piece for columns in segments for column in columns for piece in column]
                # A piece is [episode, steps, version]. bool is a kind of int, hence `type(...) is int`.
                if not all(len(piece) == 3 and all(type(part) is int for part in piece) for piece in pieces):
                    raise ValueError("not a piece")
                if any(not num_steps > 0 for _, num_steps, _ in pieces) or content["update"] != len(record) + 1:
                    raise ValueError("a gap")
                tensors = tuple(_tensor_segment(*entry) for entry in content.get("tensors", []))
                record.append(RecordedUpdate(content["update"], float(content["progress"]), segments, tensors))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"line {len(record) + 1} of {path} is not one that freerun wrote") from None
    if not record:
        raise UserError(f"{path} is empty: the run ended before its first update")
    return record


def _tensor_segment(worker: Any, number: Any, num_steps: Any, versions: Any) -> RecordedSegment:
    """Check one entry of a ledger."""
    if not all(type(part) is int and part >= 0 for part in (worker, number, num_steps, *versions)):
        raise ValueError("not a segment")
    return RecordedSegment(worker, number, num_steps, tuple(versions))


def _adapted(folder: Path) -> dict[str, float]:
    """Return the largest value of every setting that --adapt has changed in this run, by the names in
    adapting.jsonl."""
    largest: dict[str, float] = {}
    path = folder / ADAPTING
    if not path.is_file():
        return largest
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_JSON_BYTES), b""), start=1):
            try:
                change = json.loads(line)
                # "knob" is a key of the file format.
                name, value = str(change["knob"]), max(float(change["old"]), float(change["new"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"line {number} of {path} is not one that freerun wrote") from None
            largest[name] = max(value, largest.get(name, value))
    return largest


def _check(config: AnyConfig, record: Sequence[RecordedUpdate], adapted: Mapping[str, float]) -> None:
    """Refuse a run whose steps and gradients cannot be computed again to the last bit."""
    if is_tensors(config) and not all(recorded.tensors for recorded in record):
        raise UserError("this run cannot be replayed: its ledger comes from a freerun that did not number the segments")
    if config.num_learners > 1:
        raise UserError(
            "a run of several learners cannot be replayed bit for bit: one learner adds gradients up in another order"
        )
    if moved := [name for name in LEARNING_TUNABLES if name in adapted]:
        raise UserError(
            f"--adapt has changed the {' and the '.join(moved)} of this run while it went on, and the ledger does not "
            "say before which update: such a run cannot be replayed bit for bit"
        )
    if config.eval_every is not None and is_only_tensors(config.env):
        raise UserError(
            "a run whose evaluations (--eval-every) used the simulator that trains cannot be replayed: nothing records "
            "between which segments they were"
        )
    if is_tensors(config):
        return  # all environments of a simulator are stepped together again
    num_envs = max(len(columns) for recorded in record for columns in recorded.segments)
    is_lockstep = find_mode(config.mode).traits.lockstep
    together = config.num_workers or 1 if is_lockstep else config.collector.envs_per_worker
    together = max(together, adapted.get("envs_per_worker", 1))
    # A matrix product over several observations adds up in another order than one over a single observation.
    if max(num_envs, together) > 1 and not config.deterministic:
        raise UserError(
            "this run's policy acted on several observations at once, which rounds differently than one by one: only "
            "runs with one environment per worker, or with --deterministic, can be replayed bit for bit"
        )


def _saved_policies(folder: Path) -> dict[int, Path]:
    """Return the saved policies of the run, by update."""
    found = {int(name.partition("-")[2]): checkpoint.folder_of(folder) / name for name in checkpoint.names(folder)}
    paths = {update: path / POLICY for update, path in found.items() if update > 0}
    if (folder / POLICY).is_file() and (folder / SUMMARY).is_file():
        updates = read_json(folder / SUMMARY).get("updates")
        # The last policy stands beside the checkpoints; only the summary says after which update it was.
        if isinstance(updates, int):
            paths[updates] = folder / POLICY
    return paths


class _RecordedProgress(Budget):
    """A budget that gives each update the progress that it had in the run, which may decide its learning rate."""

    def __init__(self, record: Sequence[RecordedUpdate]):
        super().__init__(None, None)
        # Budget is frozen.
        object.__setattr__(self, "_record", record)

    _record: Sequence[RecordedUpdate]

    def progress(self, ledger: Ledger) -> float:
        return self._record[ledger.version].progress if ledger.version < len(self._record) else 1.0


class _ReplayedAlgorithm:
    """The algorithm of the run. It demands nothing, and takes what the record has for it."""

    def __init__(self, algorithm: Algorithm, until_update: int | None, before_update: Callable[[int], None]):
        """`before_update` is called with the version of the weights before each update."""
        self._algorithm = algorithm
        self._before_update = before_update
        self._until_update = until_update
        self.policy = algorithm.policy

    def demand(self) -> Demand:
        # An empty demand takes everything that the record has for this update.
        return Demand()

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._algorithm.observe(segments)

    def update(self, version: int, progress: float) -> Metrics:
        self._before_update(version)  # before the debugger opens: its first `step` leads into the update
        if version + 1 == self._until_update:
            print(f"Stopped before update {version + 1}: `step` leads into it, `continue` replays the rest.")
            breakpoint()  # noqa: T100
        return self._algorithm.update(version, progress)

    def state_dict(self) -> dict[str, Any]:
        return self._algorithm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._algorithm.load_state_dict(state)


class _WeightComparison:
    """A sink that compares the weights with those that the run has saved."""

    def __init__(self, paths: dict[int, Path], algorithm: _ReplayedAlgorithm):
        self._paths = paths
        self._algorithm = algorithm
        self.compared: list[int] = []
        self.first_difference: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        update = int(metrics["update"])
        # The run has saved the weights of some updates only.
        path = self._paths.get(update)
        if path is None or not path.is_file():
            return
        theirs = read_policy(path).arrays
        ours = self._algorithm.policy.arrays
        same = theirs.keys() == ours.keys() and all(np.array_equal(theirs[name], ours[name]) for name in ours)
        self.compared.append(update)
        if not same and self.first_difference is None:
            self.first_difference = update

    def close(self) -> None:
        """There is nothing to close."""
