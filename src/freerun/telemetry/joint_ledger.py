"""The books of several learners: every one of them keeps those of all, so that all decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freerun.core import AnySegment, Peers, Segment
from freerun.telemetry.ledger import Ledger

LEFT_OUT = np.empty(0, np.float32)


class JointLedger(Ledger):
    def __init__(self, peers: Peers):
        super().__init__()
        self._peers = peers

    def account(self, segments: Sequence[AnySegment]) -> None:
        """Note what the collectors of all learners have handed over."""
        mine = [
            replace(segment, obs=LEFT_OUT, action=LEFT_OUT, log_prob=LEFT_OUT, next_obs=LEFT_OUT)
            for segment in segments
            if isinstance(segment, Segment)  # tensor environments have one learner
        ]
        found: list[Segment] = [segment for part in self._peers.gather(mine) for segment in part]
        found.sort(key=lambda segment: int(segment.episode.flat[0]))
        super().account(found)
