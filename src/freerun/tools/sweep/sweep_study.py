"""The trials of a sweep, kept by Optuna in a file of the sweep's folder. A kill loses no trial that has finished."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from freerun.core import RequiredPackage
from freerun.tools.sweep.search_space import Dimension, Parameter, combinations
from freerun.tools.sweep.sweep_options import DEFAULT_TRIALS, SweepOptions

OPTUNA = RequiredPackage("optuna", "Optuna", "sweep")
JOURNAL = "study.log"
"""Optuna's file: a line for everything that happens to a trial."""
NUM_STARTUP_TRIALS = 5
"""This many trials are trained to their end before any is pruned: a median of fewer says little."""
FIRST_PRUNING_RUNG = 3
"""No trial is pruned before this tenth of its training, because no policy has learned anything yet."""
KEEP_ONE_IN = 3
"""With --sampler halving, the better third of the trials goes on after the 1st, the 3rd and the 9th tenth."""


@dataclass(frozen=True)
class TrialRow:
    """A trial as tables and the web page show it."""

    number: int
    state: str
    """running, complete, pruned or failed"""
    parameters: dict[str, Parameter]
    score: float | None = None
    seconds: float | None = None
    """Seconds of training, as a mean over the seeds."""
    runs: list[str] = field(default_factory=list)
    """The folders of its trainings, in that of the sweep."""
    reason: str | None = None
    on_front: bool = False
    """True if no other trial is both better and faster (with --cost)."""


class SweepStudy:
    """Chooses settings, and remembers how each trial went. Its methods may be called from any thread."""

    def __init__(self, folder: Path, dimensions: Sequence[Dimension], options: SweepOptions, seed: int):
        """Open the study of this folder, which nobody else has open, or begin one."""
        OPTUNA.require("freerun sweep")
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._dimensions, self._options = dimensions, options
        self._lock = threading.Lock()
        path = folder / JOURNAL
        if path.exists():
            _mend(path)
        self._study: Any = optuna.create_study(
            study_name="sweep",
            storage=JournalStorage(JournalFileBackend(str(path))),
            directions=["maximize", "minimize"] if options.cost else ["maximize"],
            pruner=_pruner(options),
            load_if_exists=True,
        )
        if options.sampler == "grid":
            # Those that are there already, because a kill may have come before all of them were.
            queued = [_fixed_parameters(trial) for trial in self._study.get_trials(deepcopy=False)]
            for parameters in combinations(dimensions):
                if parameters not in queued:
                    self._study.enqueue_trial(parameters)
        self._retry_lost()
        # A sampler that began with the same seed again would draw the settings of the first trials again.
        draws = np.random.SeedSequence((seed, len(self._study.trials))).generate_state(1)
        self._study.sampler = _sampler(options, int(draws[0]))

    @property
    def num_trials(self) -> int:
        """The number of trials that the sweep is to have."""
        if self._options.sampler != "grid":
            return self._options.trials or DEFAULT_TRIALS
        size = sum(1 for _ in combinations(self._dimensions))
        return min(size, self._options.trials or size)

    def ask(self) -> Any | None:
        """Begin the next trial and return it, or None if there are enough. Its settings are in `parameters_of`."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", category=_experimental())
            if len(self._counted()) >= self.num_trials:
                return None
            trial = self._study.ask()
            for dimension in self._dimensions:
                dimension.suggest(trial)
            return trial

    def values_of(self, trial: Any) -> dict[str, Any]:
        """Return the settings of a trial."""
        return {dimension.name: dimension.value(trial.params[dimension.name]) for dimension in self._dimensions}

    def should_prune(self, trial: Any, rung: int, value: float) -> bool:
        """Note how far a trial has come; True if it is not worth going on with."""
        if self._options.cost:  # Optuna cannot compare trials halfway by two figures at once
            return False
        with self._lock:
            trial.report(value, rung)
            return bool(trial.should_prune())

    def note_run(self, trial: Any, run: str) -> None:
        """Note in which folder a training of the trial is."""
        with self._lock:
            trial.set_user_attr("runs", [*trial.user_attrs.get("runs", []), run])

    def complete(self, trial: Any, score: float, seconds: float) -> None:
        with self._lock:
            trial.set_user_attr("seconds", seconds)
            self._study.tell(trial, [score, seconds] if self._options.cost else score)

    def prune(self, trial: Any, score: float | None, seconds: float, reason: str | None) -> None:
        import optuna

        with self._lock:
            trial.set_user_attr("seconds", seconds)
            trial.set_user_attr("score", score)
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Any, reason: str) -> None:
        with self._lock:
            trial.set_user_attr("reason", reason)
            self._tell_failed(trial)

    def rows(self) -> list[TrialRow]:
        """Return all trials but those that were lost and those that only wait to be tried."""
        with self._lock:
            front = self._front()
            return [self._row(trial, trial.number in front) for trial in self._counted()]

    # ------------------------------------------------------------------------------------------ inside Optuna

    def _tell_failed(self, trial: Any) -> None:
        import optuna

        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def _counted(self) -> list[Any]:
        from optuna.trial import TrialState

        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state != TrialState.WAITING and not _is_lost(trial)]

    def _retry_lost(self) -> None:
        """Try the settings of trials again that were running when the sweep was killed."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            # First the new trial: a kill between the two would otherwise lose these settings.
            self._study.enqueue_trial(_fixed_parameters(trial))
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _front(self) -> set[int]:
        from optuna.trial import TrialState

        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return {trial.number for trial in self._study.best_trials} if self._options.cost and complete else set()

    def _row(self, trial: Any, on_front: bool) -> TrialRow:
        notes = trial.user_attrs
        state = {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
        score = trial.values[0] if state == "complete" else notes.get("score")
        details = (notes.get("seconds"), list(notes.get("runs", [])), notes.get("reason"))
        return TrialRow(trial.number, state, dict(trial.params), score, *details, on_front)


def _fixed_parameters(trial: Any) -> dict[str, Parameter]:
    """Return the parameters of a trial, also of one that waits or was only just taken from the queue."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _is_lost(trial: Any) -> bool:
    """True for a trial that a kill or Ctrl-C has ended. Its settings are tried again, so it does not count.

    Whatever else makes a trial fail has a reason that was noted.
    """
    return trial.state.name == "FAIL" and "reason" not in trial.user_attrs


def _sampler(options: SweepOptions, seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed) if options.sampler == "tpe" else optuna.samplers.RandomSampler(seed)


def _pruner(options: SweepOptions) -> Any:
    import optuna

    if options.sampler == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=KEEP_ONE_IN)
    if options.prune and not options.cost:
        return optuna.pruners.MedianPruner(NUM_STARTUP_TRIALS, FIRST_PRUNING_RUNG)
    return optuna.pruners.NopPruner()


def _experimental() -> type[Warning]:
    from optuna.exceptions import ExperimentalWarning

    found: type[Warning] = ExperimentalWarning
    return found


def _mend(path: Path) -> None:
    """Remove what a kill may have left: half a line at the end of Optuna's file, and its lock.

    Optuna would wait for the lock, and could not read a line that goes on behind the half one.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.lock")
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
