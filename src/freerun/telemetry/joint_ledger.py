"""The ledger of several learners: each of them accounts for all, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freerun.core import AnySegment, LearnerGroup, Segment, TensorSegment
from freerun.telemetry.ledger import Ledger, SimulatedSteps

LEFT_OUT = np.empty(0, np.float32)


class JointLedger(Ledger):
    """A ledger that exchanges segments with the other learners before it counts them."""

    def __init__(self, learners: LearnerGroup):
        super().__init__()
        self._learners = learners

    def account(self, segments: Sequence[AnySegment]) -> None:
        """Count what the collectors of all learners have handed over."""
        # Only what the ledger counts is sent. Observations and actions would be most of the bytes.
        own = [
            replace(segment, obs=LEFT_OUT, action=LEFT_OUT, log_prob=LEFT_OUT, next_obs=LEFT_OUT)
            for segment in segments
            if isinstance(segment, Segment)
        ]
        simulated = [SimulatedSteps.of(segment) for segment in segments if isinstance(segment, TensorSegment)]
        gathered = self._learners.gather((own, simulated))
        everyones: list[Segment] = [segment for part, _ in gathered for segment in part]
        # All learners add in the same order, so that their sums are equal to the last bit.
        everyones.sort(key=lambda segment: int(segment.episode.flat[0]))
        super().account(everyones)
        for _, of_one in gathered:
            for steps in of_one:
                self._account_simulated(steps)
