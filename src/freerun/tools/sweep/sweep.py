"""A sweep: many trainings of one environment with different settings, chosen by Optuna, with warm workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from freerun.core import UserError, callable_name
from freerun.persistence import trust
from freerun.persistence.files import read_json, write_json
from freerun.persistence.redaction import refuse_redacted, without_secrets
from freerun.persistence.run_folder import RunFolder
from freerun.settings.config import NUM_SEEDS, AnyConfig
from freerun.settings.defaults import default_num_workers
from freerun.settings.named_code import code_in
from freerun.settings.registry import find_mode, flatten_config, make_config
from freerun.tools.sweep import sweep_report
from freerun.tools.sweep.search_space import Dimension, combinations, pack, read_dimensions, unpack, with_values
from freerun.tools.sweep.sweep_options import SweepOptions
from freerun.tools.sweep.sweep_study import OPTUNA, SweepStudy, TrialRow
from freerun.tools.sweep.trainer_processes import RemoteTrainer
from freerun.tools.sweep.trial_training import (
    FAILURES,
    NUM_RUNGS,
    LocalTrainer,
    Trainer,
    TrainingOrder,
    TrainingOutcome,
)

logger = logging.getLogger("freerun")

SWEEP = "sweep.json"
"""What a sweep varies and how: its presence makes a folder that of a sweep."""
MOST_FAILURES = 3
"""If the first trials all fail, so will the others: the sweep ends with the failure of the last one."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended, or was interrupted."""

    folder: Path
    trials: list[TrialRow]
    outcome: str
    """finished or interrupted"""

    @property
    def best(self) -> TrialRow | None:
        """The trial with the highest score; None if none has come to its end."""
        return sweep_report.best_of(self.trials)

    @property
    def front(self) -> list[TrialRow]:
        """The trials that no other beats in score and in seconds at once, the fastest first (with `cost`)."""
        return sorted((row for row in self.trials if row.on_front), key=lambda row: row.seconds or 0.0)


class Sweep:
    """Settings, what is varied, and the folder that holds all trials."""

    def __init__(self, config: AnyConfig, dimensions: Sequence[Dimension], options: SweepOptions, folder: Path):
        self.config, self.dimensions, self.options, self.folder = config, dimensions, options, folder
        OPTUNA.require("freerun sweep")
        if config.num_learners > 1:
            raise UserError("the trainings of a sweep have one learner each: leave --num-learners out")
        if config.watch:
            raise UserError("the trials of a sweep are shown by freerun watch: leave --watch out")
        if len(config.env_settings.series()) > 1:
            raise UserError("a sweep trains one workflow: name one of them")
        if config.seed + options.seeds_per_trial > NUM_SEEDS:
            raise UserError("--seeds-per-trial leads beyond the largest seed: give a smaller --seed")

    @classmethod
    def new(cls, config: AnyConfig, vary: Mapping[str, Any], options: SweepOptions) -> Sweep:
        """Begin a sweep in the folder that --run-dir names, or in a new one."""
        slug = re.sub(r"[^\w.-]+", "-", callable_name(config.env) if callable(config.env) else config.env)
        folder = config.run_dir or Path("runs") / f"sweep-{slug}-{datetime.now():%Y%m%d-%H%M%S}"
        if (folder / SWEEP).exists():
            raise UserError(f"{folder} already holds a sweep: go on with --resume {folder}, or name another --run-dir")
        config = dataclasses.replace(config, run_dir=None)
        sweep = cls(config, read_dimensions(vary, config), options, folder)
        if options.sampler == "grid":
            next(combinations(sweep.dimensions))  # raises if there is no grid
        flat = without_secrets(flatten_config(config))
        RunFolder(folder).create()
        # Signed, because --resume and --config read the names of code from files of this folder.
        trust.sign(folder, code_in(flat))
        content = {"settings": flat, "vary": pack(sweep.dimensions), "options": dataclasses.asdict(options)}
        write_json(folder / SWEEP, content)
        return sweep

    @classmethod
    def resumed(cls, folder: Path, changes: Mapping[str, Any], trusted: Sequence[str] = ()) -> Sweep:
        """Go on with a sweep that was stopped or killed. `changes` are options that may differ from before."""
        if not (folder / SWEEP).is_file():
            raise UserError(f"{folder} holds no sweep ({SWEEP} is missing): name a folder made by freerun sweep")
        content = read_json(folder / SWEEP)
        settings, vary, options = (content.get(name) for name in ("settings", "vary", "options"))
        if not isinstance(settings, dict) or not isinstance(vary, list) or not isinstance(options, dict):
            raise UserError(f"{folder / SWEEP} is not a file that freerun wrote")
        trust.check(code_in(settings), folder, trusted)
        refuse_redacted(settings)
        config = make_config(settings)
        options = SweepOptions.read({**options, **changes})
        sweep = cls(config, unpack(vary, config), options, folder)
        write_json(folder / SWEEP, {**content, "options": dataclasses.asdict(options)})
        return sweep

    def run(self, announce: Announce = lambda line: None) -> SweepResult:
        """Train all trials that are left. `announce` is told about every trial that ends."""
        release = RunFolder(self.folder).claim()
        try:
            study = SweepStudy(self.folder, self.dimensions, self.options, self.config.seed)
            trials = _Trials(self, study, announce)
            trials.write_report()
            outcome = trials.train_all()
            rows = trials.write_report(with_picture=True)
        finally:
            release()
        return SweepResult(self.folder, rows, outcome)


class _Trials:
    """Trains trials until there are enough, one after another or several at once."""

    def __init__(self, sweep: Sweep, study: SweepStudy, announce: Announce):
        self._sweep, self._study, self._announce = sweep, study, announce
        self._is_stopping = False
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        config, at_once = sweep.config, sweep.options.at_once
        if at_once > 1 and config.num_workers is None and find_mode(config.mode).traits.workers_flag == "--num-workers":
            config = dataclasses.replace(config, num_workers=max(1, default_num_workers() // at_once))
        self._config = dataclasses.replace(config, quiet=True)

    def train_all(self) -> str:
        """Return `finished`, or `interrupted` after Ctrl-C."""
        if self._sweep.options.at_once == 1:
            with contextlib.closing(LocalTrainer()) as trainer, contextlib.suppress(KeyboardInterrupt):
                self._work(trainer)
                return "interrupted" if self._is_stopping else "finished"
            return "interrupted"
        return self._train_at_once()

    def _train_at_once(self) -> str:
        with contextlib.ExitStack() as stack:
            # Here and not in the threads: the kernel kills these processes when the thread that made them ends.
            trainers = [RemoteTrainer() for _ in range(self._sweep.options.at_once)]
            for trainer in trainers:
                stack.callback(trainer.close)
            threads = [threading.Thread(target=self._work_in_thread, args=(trainer,)) for trainer in trainers]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self._is_stopping = True
                for trainer in trainers:
                    trainer.interrupt()
                for thread in threads:
                    thread.join()
        if self._failure is not None and not self._is_stopping:
            raise self._failure
        return "interrupted" if self._is_stopping else "finished"

    def _work_in_thread(self, trainer: Trainer) -> None:
        try:
            self._work(trainer)
        except BaseException as failure:  # an exception would end with its thread: the main thread raises it
            self._failure = failure

    def _work(self, trainer: Trainer) -> None:
        while not self._is_stopping and self._failure is None and (trial := self._study.ask()) is not None:
            self.write_report(has_begun=True)  # for the web page
            try:
                outcomes = self._train(trial, trainer)
            except FAILURES as failure:
                self._study.fail(trial, str(failure).partition("\n")[0])
                self._give_up_if_all_fail(failure)
            else:
                if outcomes[-1].outcome == "interrupted":
                    self._is_stopping = True  # the trial stays open, and is tried again when the sweep is resumed
                    return
                self._tell(trial, outcomes)
            rows = self.write_report()
            self._announce(sweep_report.sentence(rows, trial.number, self._study.num_trials))

    def _train(self, trial: Any, trainer: Trainer) -> list[TrainingOutcome]:
        """Train a trial with each of its seeds, until it is pruned or interrupted."""
        options, outcomes = self._sweep.options, list[TrainingOutcome]()
        base = with_values(self._config, self._study.values_of(trial))
        for index in range(options.seeds_per_trial):
            suffix = f"-seed-{base.seed + index}" if options.seeds_per_trial > 1 else ""
            run = f"trial-{trial.number:03}{suffix}"
            config = dataclasses.replace(base, seed=base.seed + index, run_dir=self._sweep.folder / run)
            self._study.note_run(trial, run)
            order = TrainingOrder(
                config,
                trial.number * options.seeds_per_trial + index,
                options.score_episodes if options.score == "evaluation" else 0,
                base.seed,
            )
            first_rung = index * NUM_RUNGS  # each seed is compared with the same seed of other trials

            def report(rung: int, value: float, first_rung: int = first_rung) -> bool:
                return self._study.should_prune(trial, first_rung + rung, value)

            outcomes.append(trainer.train(order, report))
            if outcomes[-1].is_pruned or outcomes[-1].outcome == "interrupted":
                break
        return outcomes

    def _tell(self, trial: Any, outcomes: Sequence[TrainingOutcome]) -> None:
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        seconds = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
        if outcomes[-1].is_pruned:
            self._study.prune(trial, mean, seconds, outcomes[-1].reason)
        elif mean is None or len(scores) < len(outcomes):
            self._study.fail(trial, "no episode has ended: give more --total-steps")
        else:
            self._study.complete(trial, mean, seconds)

    def _give_up_if_all_fail(self, failure: Exception) -> None:
        states = [row.state for row in self._study.rows() if row.state != "running"]
        if len(states) >= MOST_FAILURES and set(states) == {"failed"}:
            raise failure

    def write_report(self, has_begun: bool = False, with_picture: bool = False) -> list[TrialRow]:
        """Write the files that say how far the sweep has come, and return the trials."""
        with self._lock:
            rows = self._study.rows()
            sweep_report.write(self._sweep.folder, self._sweep.config, self._sweep.dimensions, rows, has_begun)
            if with_picture:
                sweep_report.draw(self._sweep.folder, self._sweep.dimensions, rows)
            return rows
