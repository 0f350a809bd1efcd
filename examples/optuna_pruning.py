"""A search over settings with Optuna, which prunes runs that are worse than others were at the same update.

pip install optuna
python examples/optuna_pruning.py
"""

from __future__ import annotations

import optuna

import freerun


def objective(trial: optuna.Trial) -> float:
    """Train with the settings that the trial suggests, and return how well that went."""

    def report(update: freerun.Update) -> None:
        trial.report(update.metrics["return_mean"], update.number)
        if trial.should_prune():
            update.prune(f"trial {trial.number} is worse than the median at update {update.number}")

    result = freerun.train(
        "CartPole-v1",
        mode="sequential",
        total_steps=10_000,
        steps_per_update=1000,
        learning_rate=trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
        num_epochs=trial.suggest_int("num_epochs", 2, 10),
        quiet=True,
        on_update=report,
    )
    if result.summary["outcome"] == freerun.PruneRun.outcome:
        raise optuna.TrialPruned(result.summary["reason"])
    return float(result.summary["mean_return"])


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=3),
    )
    study.optimize(objective, n_trials=6)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} of them pruned; the best settings: {study.best_params}")
    print(f"mean return {study.best_value:.1f}")
