"""Losses and gradients that are not finite: told of, with the step that most likely made them so."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from freerun.core import Incident, NotFinite, RunSeed, Segment, episode_seed
from freerun.telemetry.ledger import Ledger

logger = logging.getLogger("freerun")

LEARNER = -1
MOST_IN_A_ROW = 8
"""Updates of which nothing was learned, before a run that was told to continue ends all the same."""


class FiniteGuard:
    """Looks at every update. Algorithms keep their weights whole; whether to go on without the step is said here."""

    def __init__(
        self,
        ledger: Ledger,
        on_nan: Literal["continue", "stop"],
        run_seed: RunSeed,
        report: Callable[[Incident], None],
    ):
        self._ledger = ledger
        self._on_nan = on_nan
        self._run_seed = run_seed
        self._report = report
        self._in_a_row = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        bad = [name for name, value in metrics.items() if name.endswith("_loss") and not math.isfinite(value)]
        if metrics.get("num_gradient_steps", 1.0) == 0:
            bad = []  # it ended before the first: there is no loss
        if metrics.get("bad_gradients", 0.0):
            bad.append("the gradient")
        if not bad:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        failure = self._failure(int(metrics["update"]), bad)
        kind: Literal["not-finite"] = "not-finite"
        self._report(
            Incident(LEARNER, time.time(), kind, failure.episode, failure.seed, str(failure), failure.evidence)
        )
        if self._on_nan == "stop" or self._in_a_row >= MOST_IN_A_ROW:
            raise failure
        logger.warning("%s", failure)

    def _failure(self, update: int, bad: list[str]) -> NotFinite:
        text = f"update {update}: {' and '.join(bad)} not finite; no weight was changed by it"
        found = self._largest()
        if found is None:
            return NotFinite(text)
        size, what, segment, row, column = found
        number = int(segment.episode[row, column])
        number = -1 - number if number < 0 else number
        since = int(np.argmax(segment.episode[:, column] == segment.episode[row, column]))
        seed = episode_seed(self._run_seed, number)
        failure = NotFinite(
            f"{text}. The largest number among the newest steps is {what} of {size:.3g}, at step {row - since} of "
            f"episode {number} (seed {seed})"
        )
        failure.episode, failure.seed, failure.step = number, seed, row - since
        if segment.obs.shape[:2] == segment.reward.shape:
            failure.evidence = segment.part(since, row + 1, column)
        return failure

    def _largest(self) -> tuple[float, str, Segment, int, int] | None:
        found: list[tuple[float, str, Segment, int, int]] = []
        for segment in self._ledger.newest:
            for what, array in (("a reward", segment.reward), ("an observation", segment.obs)):
                if array.shape[:2] != segment.reward.shape:
                    continue  # left out: several learners tell each other no observations
                sizes = np.abs(array.astype(np.float64)).reshape(*array.shape[:2], -1).max(axis=2)
                row, column = divmod(int(sizes.argmax()), sizes.shape[1])
                found.append((float(sizes[row, column]), what, segment, row, column))
        return max(found, key=lambda entry: entry[0], default=None)

    def close(self) -> None:
        """Nothing is held."""
