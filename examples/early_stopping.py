"""Early stopping: end a run when the task is solved, or when the returns have not risen for a while.

    python examples/early_stopping.py

or, from the command line:

    freerun train CartPole-v1 --callback early_stopping:EarlyStopping
"""

from __future__ import annotations

import freerun


class EarlyStopping:
    """Stops a run at a mean return of `solved`, or after `patience` updates without a better one."""

    def __init__(self, solved: float = 150.0, patience: int = 30):
        self._solved, self._patience = solved, patience
        self._best, self._best_update = float("-inf"), 0

    def on_update(self, update: freerun.Update) -> None:
        mean_return = update.metrics["return_mean"]
        if mean_return > self._best:
            self._best, self._best_update = mean_return, update.number
        if mean_return >= self._solved:
            update.stop(f"solved: the mean return is {mean_return:.0f}")
        elif update.number - self._best_update >= self._patience:
            update.stop(f"no better return than {self._best:.0f} for {self._patience} updates")


if __name__ == "__main__":
    result = freerun.train(
        "CartPole-v1", num_workers=2, total_steps=200_000, quiet=True, on_update=EarlyStopping().on_update
    )
    print(f"{result.summary['outcome']} ({result.summary.get('reason')}) after {result.summary['env_steps']:,} steps")
    print(f"mean return {freerun.evaluate(result.policy, episodes=20).mean:.1f}")
