"""What a run notes about itself: failures of workers, counts of episodes and steps, and what everybody does when."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

from freerun.core.data import Segment

IncidentKind = Literal["death", "out-of-memory", "hang", "error", "not-finite"]


@dataclass(frozen=True)
class Incident:
    """One failure of a worker, as incidents.jsonl keeps it."""

    worker: int
    """The number of the worker; −1 for the learner itself."""
    time: float
    """Seconds since the epoch."""
    kind: IncidentKind
    episode: int | None
    seed: int | None
    """The seed that the environment was reset with, if one episode caused the failure."""
    text: str
    """What happened, with the traceback of an exception or the stack of a worker that hung."""
    evidence: Segment | None = None
    """The steps that caused it. They are kept in bad/ so that a person can look at them and play them again."""


@dataclass
class Counts:
    """What a collector has counted so far.

    The ledger counts on its own, so that the two can be checked against each other after every update.
    """

    episodes_started: int = 0
    episodes_in_flight: int = 0
    """Episodes that were started and not yet handed to the learner: they run, or wait for the rest of their round."""
    episodes_cut: int = 0
    """Episodes that were handed over only in part. The rest was dropped, or never played because the worker died."""
    episodes_delivered: int = 0
    """Whole episodes that have arrived, whether or not the learner has taken them."""
    episodes_rerun: int = 0
    episodes_dropped: int = 0
    """Episodes that were lost completely: a queue dropped them, or their worker died."""
    episodes_settled: int = 0
    """All episodes below this number are finished: nothing more of them will be handed over."""
    steps_dropped: int = 0
    steps_dropped_by_worker: dict[int, int] = field(default_factory=dict)
    steps_dropped_by_length: dict[int, int] = field(default_factory=dict)
    """Dropped steps by the length of their episode, once the length is known."""
    drop_bias: float = 0.0
    """How much longer the episodes of dropped steps are than the others: 0.5 means by half, 0 means no bias."""
    segments_rejected: int = 0
    """Segments that were refused because an observation or a reward was not finite."""
    queue_fill: float | None = None
    """The share of the queue that is full, from 0 to 1; None if the mode has no queue."""
    steps_delivered: int = 0
    worker_restarts: int = 0
    busy_seconds: float = 0.0
    """Seconds that workers spent on delivered episodes, summed over all workers."""
    step_calls: int | None = None
    """Calls of step and reset that the workers of this process have begun. One call may step several environments. None
    if the mode does not count them."""


@dataclass(frozen=True)
class StartPoint:
    """Where collecting starts: at the first episode, or where an earlier run or training ended."""

    episode: int = 0
    counts: Counts = field(default_factory=Counts)
    """The counts so far. No episode is in flight at this point."""
    lengths: tuple[int, ...] = ()
    """The lengths of the last episodes, by number. Collectors estimate from them how many episodes a demand in steps
    needs."""


class State(IntEnum):
    """What a worker, the learner or a stage of the learner is doing. The timeline shows it.

    The numbers are part of timeline.jsonl: they never change.
    """

    BUSY = 0
    WAITING_FOR_SLOT = 1
    """A worker has finished a unit, and no slot is free to write it to."""
    WAITING_FOR_WEIGHTS = 2
    """A worker waits for the next weights, because the lag budget allows no more work with these."""
    WAITING_FOR_DATA = 3
    """The learner, or a stage of it, needs more data."""
    WAITING_FOR_OTHERS = 4
    """A worker that steps together with others waits for the slowest of them, or for the learner."""
    RESTARTING = 5
    """A worker has ended, and its replacement is not ready yet."""
    PARKED = 6
    """A worker is switched off for now by --adapt."""


class Tracks(Protocol):
    """The tracks of the timeline. Workers, the learner and its stages note what they do, each on its own track."""

    def set_state(self, track: int, state: State, at: float | None = None) -> None:
        """End the last state and begin this one: now, or at that moment of `time.perf_counter`."""
        ...


class NoTracks:
    """Tracks for collectors without a timeline: they record nothing."""

    def set_state(self, track: int, state: State, at: float | None = None) -> None:
        """Nothing is noted."""
