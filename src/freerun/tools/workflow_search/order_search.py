"""The search: proposes orders, has them trained, and keeps what came out. `freerun.search_workflows` calls it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from freerun.core import Common, UserError, require_positive
from freerun.persistence import trust
from freerun.persistence.files import read_json
from freerun.persistence.redaction import without_secrets
from freerun.persistence.run_folder import RunFolder
from freerun.run.series import ABOUT_ONE_RUN
from freerun.settings.config import AnyConfig, TrainConfig
from freerun.settings.defaults import complete
from freerun.settings.env_flags import NOT_GIVEN, settings_class
from freerun.settings.named_code import code_in
from freerun.settings.presets import settings_of
from freerun.settings.registry import flatten_config, make_config, part_classes
from freerun.tools.workflow_search.order_processes import trainer_processes
from freerun.tools.workflow_search.order_samplers import SAMPLERS, OrderSampler
from freerun.tools.workflow_search.order_trainer import TrainerGroup, TrainingJob, inline_trainers
from freerun.tools.workflow_search.precedence import ORDERS
from freerun.tools.workflow_search.search_folder import SCORE, SETTINGS, SearchFolder
from freerun.tools.workflow_search.search_report import Ranking, write_report

logger = logging.getLogger("freerun")

DEFAULTS = {
    **settings_of(["defender"]),
    "total_episodes": 2000,
    "episode_steps": 30,
    "compliance_weight": 20.0,
    "envs_per_worker": 16,
    "checkpoint_every": "never",
}
"""What is trained if neither --preset nor --config is given: short trainings in which the order matters. With episodes
of 100 steps and the usual weight of 10, the compliance of trained defenders was between 13 % and 99 %."""
ORDER_FIELD = "workflow"
"""The setting that an environment must have to be searched: it takes the orders."""
FROM_NOTHING = -1
"""The number of the trial that shows the effect of --warm-start: its training is none of the budget's."""
KEPT = ("sampler", "seeds_per_trial", "warm_start", "trial_episodes")
"""The options that stay the same when a search is continued."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class SearchOptions:
    """How to search. All other flags are those of `freerun train`."""

    budget_trials: Common[int] = 30
    """How many orders to try. An order may be tried again, with other seeds. A search that is continued with a larger
    number goes on."""
    sampler: Common[Literal["gp", "random", "halving"]] = "gp"
    """Who chooses: a Gaussian process on pairwise precedences, random search, or successive halving."""
    seeds_per_trial: Common[int] = 1
    """Trainings of each trial, with different seeds. The trial's score is their mean."""
    at_once: Common[int] = 1
    """Trainings that run at the same time, each in a process of its own. They share --num-workers."""
    warm_start: Common[bool] = False
    """Start each training from the weights of the best one so far. Another training, from nothing, shows the effect."""
    trial_episodes: Common[int] = 50
    """Fresh episodes by which each trained policy is judged. They are the same for all."""

    def __post_init__(self) -> None:
        require_positive(self, "budget_trials", "seeds_per_trial", "at_once", "trial_episodes")


@dataclass(frozen=True)
class SearchResult:
    """What a search has found so far."""

    folder: Path
    ranking: Ranking
    outcome: Literal["finished", "interrupted"]

    @property
    def best(self) -> str:
        """The order that the trainings recommend."""
        return self.ranking.best


def search(config: AnyConfig, options: SearchOptions, say: Say = logger.info) -> SearchResult | None:
    """Search as configured, and return what was found; None if not even one trial was finished.

    The same settings with the same --run-dir continue a search that was stopped or killed.
    """
    config = _for_search(complete(config))
    path = config.run_dir or Path("runs") / f"search-{config.mode}-{datetime.now():%Y%m%d-%H%M%S}"
    if not path.is_dir():
        RunFolder(path).create()
    # Two searches in one folder would each write a list of trainings without those of the other.
    release = RunFolder(path).claim()
    try:
        return _search_in(path, config, options, say)
    finally:
        release()


def _search_in(path: Path, config: AnyConfig, options: SearchOptions, say: Say) -> SearchResult | None:
    flat_config = without_secrets(flatten_config(config))
    folder = SearchFolder.open(path, options.seeds_per_trial, options.budget_trials, _identity(flat_config, options))
    trust.sign(path, code_in(flat_config))
    sampler = SAMPLERS[options.sampler](options.budget_trials, config.seed)
    is_finished = _is_complete(folder, options)
    if not is_finished:
        # Ctrl-C may come between two trainings, too: what is finished is reported in any case.
        with contextlib.suppress(KeyboardInterrupt), _trainers(config, options) as trainers:
            is_finished = _TrialLoop(config, options, folder, sampler, trainers, say).run()
    if not folder.finished():
        return None
    ranking = write_report(folder, sampler)
    return SearchResult(path, ranking, "finished" if is_finished else "interrupted")


def search_workflows(env: str | None = None, *, run_dir: str | Path | None = None, **settings: Any) -> SearchResult:
    """Find the best workflow: `search_workflows(budget_trials=20, red_agent="RedMeanderAgent", at_once=2)`.

    Settings have the names of the flags of `freerun search-workflows`, and its defaults. `run_dir` is the folder of the
    search; the same call continues the search that it holds.
    """
    names = {field.name for field in dataclasses.fields(SearchOptions)}
    options = SearchOptions(**{name: settings.pop(name) for name in names & settings.keys()})
    given = settings | ({"env": env} if env else {}) | ({"run_dir": Path(run_dir)} if run_dir else {})
    if preset := given.pop("preset", ()):
        given = {**settings_of([preset] if isinstance(preset, str) else preset), **given}
    else:
        given = {**defaults_beside(given), **given}
    result = search(make_config(with_orders(given)), options)
    if result is None:
        raise KeyboardInterrupt
    return result


def defaults_beside(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a search that suit the settings that were given."""
    parts = part_classes({**DEFAULTS, **given})
    known = {field.name for part in (TrainConfig, *parts.values()) for field in dataclasses.fields(part)}
    if "total_steps" in given:
        known.discard("total_episodes")
    return {name: value for name, value in DEFAULTS.items() if name in known}


def with_orders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add all orders to the settings of an environment that can be searched."""
    fields = settings_class(settings.get("env")).series_fields
    if ORDER_FIELD not in fields:
        raise UserError(f"{settings.get('env')} has no workflows to search: use freerun/NetworkDefence-v0 or CybORG")
    if named := [name for name in fields if settings.get(name) not in NOT_GIVEN]:
        raise UserError(f"a search tries all workflows: leave --{named[0]} out")
    return {**settings, ORDER_FIELD: ORDERS}


def resumed(folder: Path, named: list[str]) -> tuple[AnyConfig, SearchOptions]:
    """Return the settings of a search that was stopped or killed, and its options. `named` is code that is trusted."""
    known = read_json(folder / SETTINGS)
    settings, search, budget = known.get("settings"), known.get("search"), known.get("budget_trials")
    foreign = UserError(f"{folder / SETTINGS} was not written by a search")
    if not isinstance(settings, dict) or not isinstance(search, dict) or not isinstance(budget, int):
        raise foreign
    usual = {name: getattr(SearchOptions(), name) for name in KEPT}
    if {name: type(value) for name, value in search.items()} != {name: type(value) for name, value in usual.items()}:
        raise foreign
    if search["sampler"] not in SAMPLERS:
        raise foreign
    trust.check(code_in(settings), folder, named)
    return make_config(with_orders({**settings, "run_dir": folder})), SearchOptions(budget_trials=budget, **search)


def _for_search(config: AnyConfig) -> AnyConfig:
    """Refuse what a search cannot have, and let its trainings show nothing of their own."""
    if config.num_learners > 1:
        raise UserError("trainings of a search have one learner each: leave --num-learners out")
    if config.callback or config.init_from is not None:
        name = "--callback" if config.callback else "--init-from"
        raise UserError(f"{name} is for a single training: leave it out of a search")
    return dataclasses.replace(config, quiet=True, watch=False)


def _identity(flat_config: Mapping[str, Any], options: SearchOptions) -> dict[str, Any]:
    """Return the settings that must be the same when a search goes on: not how long or how parallel it is."""
    left_out = (*ABOUT_ONE_RUN, ORDER_FIELD)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in flat_config.items()
        if name not in left_out
    }
    return {"settings": settings, "search": {name: getattr(options, name) for name in KEPT}}


def _trainers(config: AnyConfig, options: SearchOptions) -> AbstractContextManager[TrainerGroup]:
    if options.at_once == 1:
        return inline_trainers(config, options.trial_episodes)
    return trainer_processes(config, options.trial_episodes, options.at_once)


def _is_complete(folder: SearchFolder, options: SearchOptions) -> bool:
    """True if nothing is left to train: neither trials, nor the training that shows the effect of --warm-start."""
    shows_effect = any(line["trial"] == FROM_NOTHING for line in folder.lines)
    has_all = len(folder.trials()) >= options.budget_trials and not _unfinished(folder)
    return has_all and (shows_effect or not options.warm_start)


def _unfinished(folder: SearchFolder) -> dict[int, list[dict[str, Any]]]:
    """Return the trials of which a killed search has finished only some trainings."""
    return {trial: lines for trial, lines in folder.trials().items() if len(lines) < folder.seeds_per_trial}


class _TrialLoop:
    """The state of a search that runs: what waits to be trained, and what is being trained."""

    def __init__(
        self,
        config: AnyConfig,
        options: SearchOptions,
        folder: SearchFolder,
        sampler: OrderSampler,
        trainers: TrainerGroup,
        say: Say,
    ):
        self._config, self._options, self._folder = config, options, folder
        self._sampler, self._trainers, self._say = sampler, trainers, say
        self._orders = {trial: ORDERS.index(lines[0]["order"]) for trial, lines in folder.trials().items()}
        """The order of each trial that was begun."""
        self._blocks = {(self._orders[trial], self._block(lines)) for trial, lines in folder.trials().items()}
        """Orders with the blocks of seeds that their trials have. A kill may have lost the first one of several."""
        self._waiting: list[tuple[int, int]] = []
        """Trials and seeds of the trainings to start next."""
        self._running: list[TrainingJob] = []

    def run(self) -> bool:
        """Train until the budget is spent. Return False if the search was interrupted."""
        for trial, lines in _unfinished(self._folder).items():
            done = {line["seed"] for line in lines}
            self._waiting += [(trial, seed) for seed in self._seeds(self._block(lines)) if seed not in done]
        while True:
            while len(self._running) < self._trainers.num_at_once and self._start_next():
                pass
            if not self._running:
                break
            if not self._finish_one():
                return False
        return not self._options.warm_start or self._train_from_nothing()

    def _start_next(self) -> bool:
        if not self._waiting and not self._begin_trial():
            return False
        trial, seed = self._waiting.pop(0)
        self._start(trial, self._orders[trial], seed, self._best_run() if self._options.warm_start else None)
        return True

    def _start(self, trial: int, order: int, seed: int, init_from: Path | None) -> None:
        suffix = "-from-nothing" if trial == FROM_NOTHING else ""
        name = f"{order:03}-{ORDERS[order].replace(',', '-')}-seed-{seed}{suffix}"
        job = TrainingJob(trial, order, seed, self._folder.path / name, init_from)
        self._trainers.start(job)
        self._running.append(job)

    def _begin_trial(self) -> bool:
        """Choose the next order; False if the budget is spent, or the choice depends on what is being trained."""
        if len(self._orders) >= self._options.budget_trials:
            return False
        finished = self._folder.finished()
        pending = [self._orders[trial] for trial in {job.trial for job in self._running}]
        # The number of the trial decides what is drawn, so a search that was killed chooses as it would have.
        rng = np.random.default_rng([self._config.seed, len(self._orders)])
        order = self._sampler.propose(finished, pending, rng)
        if order is None:
            return False
        trial = max(self._orders, default=-1) + 1
        block = next(number for number in itertools.count() if (order, number) not in self._blocks)
        self._orders[trial] = order
        self._blocks.add((order, block))
        self._waiting += [(trial, seed) for seed in self._seeds(block)]
        return True

    def _seeds(self, block: int) -> list[int]:
        """Return the seeds of an order's first trial (block 0), of its second one, …"""
        first = self._config.seed + block * self._options.seeds_per_trial
        return list(range(first, first + self._options.seeds_per_trial))

    def _block(self, lines: list[dict[str, Any]]) -> int:
        """Return the number of the block from which the seeds of a trial are."""
        return int(min(line["seed"] for line in lines) - self._config.seed) // self._options.seeds_per_trial

    def _best_run(self) -> Path | None:
        lines = self._folder.counted
        return self._folder.path / max(lines, key=lambda line: line[SCORE])["run"] if lines else None

    def _finish_one(self) -> bool:
        job, figures = self._trainers.wait()
        self._running.remove(job)
        if figures is None:
            return False
        started_from = None if job.init_from is None else job.init_from.name
        line = {"trial": job.trial, "order": ORDERS[job.order], "seed": job.seed, "started_from": started_from}
        self._folder.add({**line, **figures})
        number = f"{len(self._folder.counted)} of {self._options.budget_trials * self._options.seeds_per_trial}"
        self._say(
            f"{'From nothing' if job.trial == FROM_NOTHING else number}: {ORDERS[job.order].replace(',', ' › ')} "
            f"(seed {job.seed}) scores {figures[SCORE]:.1f}, compliance {figures['compliance']:.0%}, "
            f"{figures['wall_seconds']:.1f} s"
        )
        return True

    def _train_from_nothing(self) -> bool:
        """Train the best order once more, without the weights of others, to show what --warm-start has changed."""
        if any(line["trial"] == FROM_NOTHING for line in self._folder.lines):
            return True
        best = max(self._folder.counted, key=lambda line: line[SCORE])
        self._start(FROM_NOTHING, ORDERS.index(best["order"]), best["seed"], None)
        return self._finish_one()
