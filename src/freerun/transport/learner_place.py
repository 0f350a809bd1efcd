"""Says which of several learners this process is. This module does not import torch, so workers may import it."""

from __future__ import annotations

import os
from dataclasses import dataclass

_assigned: LearnerPlace | None = None  # set in a process that was started as one of several learners


@dataclass(frozen=True)
class LearnerPlace:
    """The rank of one learner among several, and the address at which they meet."""

    index: int
    count: int
    host: str
    port: int
    local_index: int
    """The rank among the learners on the same machine."""
    local_count: int
    """The number of learners on the same machine."""

    @classmethod
    def given_by_torchrun(cls) -> LearnerPlace | None:
        """The place that torchrun has put into the environment variables; None if there is only one learner."""
        # RANK and WORLD_SIZE alone prove nothing: other launchers set them too. Only torchrun sets this one.
        if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        index, count, local_index, local_count, port = (int(os.environ[name]) for name in names)
        return cls(index, count, os.environ["MASTER_ADDR"], port, local_index, local_count)


def assign(place: LearnerPlace) -> None:
    """Note that this process was started as this learner."""
    global _assigned
    _assigned = place


def current() -> LearnerPlace | None:
    """The place of this process if it is one of several learners; torchrun or the first learner has started it."""
    return LearnerPlace.given_by_torchrun() if _assigned is None else _assigned


def is_first() -> bool:
    """True if this process is the learner that writes the run folder and the display."""
    place = current()
    return place is None or place.index == 0
