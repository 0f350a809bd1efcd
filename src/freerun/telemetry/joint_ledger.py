"""The ledger of several learners: each of them accounts for all, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freerun.core import AnySegment, LearnerGroup, Segment
from freerun.telemetry.ledger import Ledger

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
            if isinstance(segment, Segment)  # tensor environments have one learner
        ]
        everyones: list[Segment] = [segment for part in self._learners.gather(own) for segment in part]
        # All learners add in the same order, so that their sums are equal to the last bit.
        everyones.sort(key=lambda segment: int(segment.episode.flat[0]))
        super().account(everyones)
