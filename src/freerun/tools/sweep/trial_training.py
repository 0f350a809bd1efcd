"""The trainings of a sweep in one process, one after another, by the same warm workers where the settings allow it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from freerun.core import CallbackFailure, EnvFailure, PruneRun, UserError
from freerun.experiment import Result, run
from freerun.run.evaluation import evaluate
from freerun.run.pool import Pool
from freerun.run.series import can_share_workers
from freerun.run.update_hooks import Update
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.factories import make_factory
from freerun.settings.registry import flatten_config

NUM_RUNGS = 10
"""A training is compared with others after each tenth, whatever its updates are: so trials with other numbers of steps
per update can be compared too."""
MOST_POOLS = 4
"""So many groups of workers are kept at most. Trials that differ in the seed or in the environment need different
ones."""
LEARNER_SETTINGS = (
    "total_steps",
    "total_episodes",
    "device",
    "learner_threads",
    "eval_every",
    "eval_episodes",
    "run_dir",
    "init_from",
    "init_optimizer",
    "checkpoint_every",
    "keep_checkpoints",
    "display",
    "watch",
    "quiet",
)
"""Settings of a run that its workers know nothing about. Those of the algorithm and of trackers are not known to them
either, beyond the shape of the policy, and `Pool` looks at that."""

FAILURES = (UserError, EnvFailure, CallbackFailure)
"""What a trial may fail with, while others succeed. Anything else ends the sweep."""

Report = Callable[[int, float], bool]
"""Takes the number of a rung and the mean return there; True if the trial is to be pruned."""


@dataclass(frozen=True)
class TrainingOrder:
    """One training of a trial: a trial has one per seed."""

    config: AnyConfig
    number: int
    """The number of the training in the sweep."""
    score_episodes: int = 0
    """Score the policy by this many fresh episodes; 0 scores it by the last episodes of the training."""
    score_seed: int = 0
    """The seed of those episodes: the same in all trials."""


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training ended."""

    outcome: str
    """As summary.json has it: finished, pruned, interrupted, …"""
    score: float | None
    """None if no episode has ended."""
    seconds: float
    """The seconds of training, without the start of workers."""
    reason: str | None = None

    @property
    def is_pruned(self) -> bool:
        return self.outcome == PruneRun.outcome


class Trainer(Protocol):
    """Trains what it is given, in this process or in another one."""

    def train(self, order: TrainingOrder, report: Report) -> TrainingOutcome: ...

    def close(self) -> None: ...


class LocalTrainer:
    """Trains in this process, and keeps the workers of earlier trainings for later ones."""

    def __init__(self) -> None:
        self._pools: OrderedDict[str, Pool] = OrderedDict()

    def train(self, order: TrainingOrder, report: Report) -> TrainingOutcome:
        config = complete(order.config)
        result = self._run(config, order.number, _RungReports(report))
        score = result.summary["mean_return"]
        if order.score_episodes and result.summary["outcome"] == "finished":
            score = evaluate(result.policy, order.score_episodes, order.score_seed).mean
        usable = None if score is None or not math.isfinite(score) else float(score)
        summary = result.summary
        return TrainingOutcome(summary["outcome"], usable, summary["wall_seconds"], summary.get("reason"))

    def _run(self, config: AnyConfig, number: int, on_update: Callable[[Update], None]) -> Result:
        if not _can_share_workers(config):
            return run(config, on_update=on_update)
        key = _workers_key(config)
        pool = self._pools.pop(key, None) or Pool(make_factory(config))
        try:
            result = run(config, pool, number, on_update=on_update)
        except BaseException:
            pool.close()  # nobody knows what a training that failed has left behind
            raise
        self._pools[key] = pool  # at the end: the one that was used last
        while len(self._pools) > MOST_POOLS:
            self._pools.popitem(last=False)[1].close()
        return result

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _can_share_workers(config: AnyConfig) -> bool:
    """True if the workers of this training can serve another one. Callbacks of the user's own may change
    environments, --adapt changes the number of workers, and the environments of a series differ."""
    own = config.callback or config.adapting.adapt or config.env_settings.series()
    return can_share_workers(config) and not own


def _workers_key(config: AnyConfig) -> str:
    """Return what trainings must have in common to share workers."""
    learner = {field.name for part in (config.algorithm, config.tracking) for field in dataclasses.fields(part)}
    learner.update(LEARNER_SETTINGS)
    # Two functions of the same name are the same environment only if they are the same object.
    shared = {name: value for name, value in flatten_config(config).items() if name not in learner}
    env: Any = config.env if isinstance(config.env, str) else id(config.env)
    return json.dumps({**shared, "env": env}, sort_keys=True, default=str)


class _RungReports:
    """A callback that reports the mean return after each tenth of a training, and prunes if it is told to."""

    def __init__(self, report: Report):
        self._report = report
        self._last = 0

    def __call__(self, update: Update) -> None:
        rung = int(NUM_RUNGS * update.metrics["progress"])
        value = update.metrics["return_mean"]
        # At the end there is nothing left to save.
        if not self._last < rung < NUM_RUNGS or not math.isfinite(value):
            return
        self._last = rung
        if self._report(rung, value):
            update.prune(f"worse than other trials after {100 * rung // NUM_RUNGS} % of the training")
