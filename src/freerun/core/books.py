"""What is noted while a run goes on: incidents, counts, and who does what at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

from freerun.core.data import Segment

IncidentKind = Literal["death", "out-of-memory", "hang", "error", "not-finite"]


@dataclass(frozen=True)
class Incident:
    """A worker that failed, as it is kept in incidents.jsonl."""

    worker: int
    """−1 where the learner itself is meant."""
    time: float
    """Seconds since the epoch."""
    kind: IncidentKind
    episode: int | None
    seed: int | None
    """That the episode's environment was reset with, where one episode is to blame."""
    text: str
    """What happened, with the traceback of an error or the stack of a worker that hung."""
    evidence: Segment | None = None
    """Steps that are kept aside, so that they can be looked at and played again."""


@dataclass
class Counts:
    """A collector's own books, kept apart from the ledger's so that the two can be checked against each other."""

    episodes_started: int = 0
    episodes_in_flight: int = 0
    """Started and not handed to the learner: running, or waiting for the rest of their round."""
    episodes_cut: int = 0
    """Handed over in part: what had arrived was trained, the rest was dropped, or never played as the worker died."""
    episodes_delivered: int = 0
    """Whole ones that have arrived, whether or not the learner has taken them."""
    episodes_rerun: int = 0
    episodes_dropped: int = 0
    """Of which nothing was handed over: dropped, or begun and lost with their worker for good."""
    episodes_settled: int = 0
    """Of no episode below this number will anything more be handed over."""
    steps_dropped: int = 0
    steps_dropped_by_worker: dict[int, int] = field(default_factory=dict)
    steps_dropped_by_length: dict[int, int] = field(default_factory=dict)
    """By the length of their episode, once it is known."""
    drop_bias: float = 0.0
    """How much longer the episodes of dropped steps are than those of the others, as a share; 0 means no harm."""
    segments_rejected: int = 0
    """For an observation or a reward that was not finite."""
    queue_fill: float | None = None
    """The share of the queue's room that is in use, where a mode has a queue."""
    steps_delivered: int = 0
    worker_restarts: int = 0
    busy_seconds: float = 0.0
    """Time that workers spent on delivered episodes, summed over workers."""


@dataclass(frozen=True)
class Start:
    """Where collecting begins: with the first episode, or where an earlier run or training has left off."""

    episode: int = 0
    counts: Counts = field(default_factory=Counts)
    """The books so far, with nothing in flight."""
    last_round: tuple[int, int] = (0, 0)
    """Steps and episodes of the last update: a demand in steps is estimated by them."""
    lengths: tuple[int, ...] = ()
    """Of the last episodes."""


class State(IntEnum):
    """What a worker, the learner or a stage of it does at a moment."""

    BUSY = 0
    WAITING_FOR_SLOT = 1
    """A worker: it has finished something, and no room for it is free."""
    WAITING_FOR_WEIGHTS = 2
    """A worker: all that may start with these weights has been dealt out."""
    WAITING_FOR_DATA = 3
    """The learner, or a stage: it needs more to learn from."""
    WAITING_FOR_OTHERS = 4
    """A worker that steps together with others: the slowest of them, or the learner, is not done yet."""
    RESTARTING = 5
    """A worker: from its end until its successor is ready."""
    PARKED = 6
    """A worker: --adapt does without it for now."""


class Tracks(Protocol):
    """Where workers, the learner and its stages note what they do, each on the track of its number."""

    def enter(self, track: int, state: State, at: float | None = None) -> None:
        """The last state ends and this one begins: now, or at that moment of `time.perf_counter`."""
        ...


class NoTracks:
    """Where nobody wants to know."""

    def enter(self, track: int, state: State, at: float | None = None) -> None:
        """Nothing is noted."""
