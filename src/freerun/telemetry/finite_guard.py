"""Reports losses and gradients that are not finite, with the step that most likely caused them."""

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
MOST_BAD_UPDATES = 8
"""With --on-nan continue, the run still ends after this many bad updates in a row: it no longer learns anything."""


class FiniteGuard:
    """A sink that checks every update. Algorithms skip a bad gradient step; this decides whether the run goes on."""

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
        self._num_bad_updates = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        bad = [name for name, value in metrics.items() if name.endswith("_loss") and not math.isfinite(value)]
        if metrics.get("num_gradient_steps", 1.0) == 0:
            bad = []  # the update made no gradient step, so its losses are NaN by definition
        if metrics.get("bad_gradients", 0.0):
            bad.append("the gradient")
        if not bad:
            self._num_bad_updates = 0
            return
        self._num_bad_updates += 1
        failure = self._failure(int(metrics["update"]), bad)
        kind: Literal["not-finite"] = "not-finite"
        self._report(
            Incident(LEARNER, time.time(), kind, failure.episode, failure.seed, str(failure), failure.evidence)
        )
        if self._on_nan == "stop" or self._num_bad_updates >= MOST_BAD_UPDATES:
            raise failure
        logger.warning("%s", failure)

    def _failure(self, update: int, bad: list[str]) -> NotFinite:
        """Return the error that names the update and, if one can be found, the step with the largest number."""
        text = f"update {update}: {' and '.join(bad)} not finite; no weight was changed by it"
        found = self._largest_number()
        if found is None:
            return NotFinite(text)
        # Divergence usually begins with one extreme number, so the largest is the best suspect there is.
        size, what, segment, row, column = found
        number = int(segment.episode[row, column])
        # The first row of this episode in the segment: argmax of booleans is the first True.
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

    def _largest_number(self) -> tuple[float, str, Segment, int, int] | None:
        """Return the largest number among the newest rewards and observations: its size, what it is, and where it
        is."""
        found: list[tuple[float, str, Segment, int, int]] = []
        for segment in self._ledger.newest_segments:
            for what, array in (("a reward", segment.reward), ("an observation", segment.obs)):
                if array.shape[:2] != segment.reward.shape:
                    continue  # several learners do not send each other observations
                # In float64, because the absolute value of the lowest int8 or int64 does not fit its own type.
                sizes = np.abs(array.astype(np.float64)).reshape(*array.shape[:2], -1).max(axis=2)
                row, column = divmod(int(sizes.argmax()), sizes.shape[1])
                found.append((float(sizes[row, column]), what, segment, row, column))
        return max(found, key=lambda entry: entry[0], default=None)

    def close(self) -> None:
        """This sink holds nothing open."""
