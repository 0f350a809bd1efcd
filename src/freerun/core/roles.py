"""Who does what: policies act, collectors bring, algorithms learn, sinks write it down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from freerun.core.books import Counts, Incident, NoTracks, Start, Tracks
from freerun.core.data import AnySegment, Array, Demand, FloatArray, Metrics
from freerun.core.seeds import RunSeed

if TYPE_CHECKING:  # workers do without torch
    import torch
    from torch import Tensor


Acceleration = Literal["auto", "none", "graph", "compile"]
"""On a GPU: whether steps that are done again and again are recorded as CUDA graphs, and their kernels fused before."""


class Decision(NamedTuple):
    action: Array
    head: FloatArray
    """What the log-probability of the action is worked out from: later, for a whole segment in one call."""


class TensorActor(Protocol):
    """A policy on the device of a simulator."""

    generator: torch.Generator

    def load(self, weights: FloatArray) -> None: ...

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions for [N, ...] observations, and their log-probabilities."""
        ...


class Policy(Protocol):
    """The part of an algorithm that travels to the workers."""

    weights: FloatArray
    """All weights and normaliser statistics in one flat buffer: what `publish` sends."""
    head_size: int
    """Numbers of a `Decision.head` per action."""

    @property
    def arrays(self) -> Mapping[str, FloatArray]:
        """The same by name: what policy.safetensors holds."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it takes, besides the arrays, to build this policy again."""
        ...

    def load(self, weights: FloatArray) -> None: ...

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        """The noise for that many actions, [num_steps, ...]; one long draw equals two short ones."""
        ...

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        """Actions for a batch of observations; without noise the most likely ones."""
        ...

    def single(self) -> Callable[[Array, FloatArray, FloatArray], Any]:
        """`act` for one observation, as a function with all it needs at hand: (obs, noise, head to fill) -> action.

        It is asked for again after each `load`."""
        ...

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Of the actions that the loaded weights have chosen, [N, ...] -> [N]."""
        ...

    def on(self, device: torch.device, seed: int) -> TensorActor:
        """The same policy for observations that are tensors; it samples with its own generator."""
        ...


class Collector(Protocol):
    """A mode: where workers live, what unit they hand over, who waits for whom."""

    num_workers: int

    def counts(self) -> Counts: ...

    def publish(self, weights: FloatArray, version: int) -> None: ...

    def collect(self, demand: Demand) -> Sequence[AnySegment]:
        """Wait until the demand is met, then return; an empty demand takes what has already arrived."""
        ...

    def close(self) -> None: ...


class Renewable(Collector, Protocol):
    """A mode whose workers can go on from one training to the next: those that hand over whole episodes."""

    def renew(self, start: Start) -> None:
        """Begin another training: its episodes are numbered from here on."""
        ...


@dataclass(frozen=True)
class Dial:
    """A setting that can be turned while a run goes on."""

    name: str
    read: Callable[[], float]
    turn: Callable[[float], None]
    """May return before all of it has come into force."""
    low: float
    high: float
    is_whole: bool = True
    is_settled: Callable[[], bool] = lambda: True
    """Whether the last turn has come into force."""
    between_updates: bool = False
    """Only the learner may turn it, and only between two updates."""


class Adjustable(Collector, Protocol):
    """A mode of which something can be moved while it runs: what --adapt needs."""

    def dials(self) -> list[Dial]: ...


class Driven(Collector, Protocol):
    """A mode whose simulator must stay on the thread that made it: the learner moves to another."""

    def beside(self, learn: Callable[[], None]) -> None:
        """Collect on this thread until `learn`, on a thread and a CUDA stream of its own, has ended."""
        ...


class Algorithm(Protocol):
    """Learns from segments. It declares what it needs and never calls an environment."""

    policy: Policy

    def demand(self) -> Demand: ...

    def observe(self, segments: Sequence[AnySegment]) -> None: ...

    def update(self, version: int, progress: float) -> Metrics:
        """Learn from what was observed; `version` counts updates so far, `progress` goes from 0 to 1 over the run."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Peers(Protocol):
    """The learners of a run that update together, as one of them sees them. All must call the same, in the same order:
    a call waits for the others."""

    index: int
    count: int

    def sum(self, tensor: Any) -> None:
        """A tensor's sum over all learners, in place: the same bits for everyone."""
        ...

    def gather(self, thing: Any) -> list[Any]:
        """What each of them has brought, in their order."""
        ...


class Alone:
    """One learner."""

    index = 0
    count = 1

    def sum(self, tensor: Any) -> None:
        """It is the sum."""

    def gather(self, thing: Any) -> list[Any]:
        return [thing]


class Gauge(Protocol):
    """Something measured beside the learning: it adds to the record of an update."""

    def read(self, step: int) -> Metrics: ...

    def close(self) -> None: ...


class MetricSink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Room:
    """Upper bounds of what --adapt may move of a mode."""

    most_workers: int
    most_envs_per_worker: int = 1
    most_queue_size: int | None = None
    """Derived from the configured one if None."""
    most_collection_batch: int | None = None


def _ignore(incident: Incident) -> None:
    """For collectors that nobody asked to tell."""


@dataclass(frozen=True)
class CollectorSettings:
    """What every mode is built with."""

    num_workers: int
    max_lag: int | None
    """None sets no limit: workers wait only where there is no room for what they would collect."""
    seed: RunSeed
    deterministic: bool = False
    tracks: Tracks = field(default_factory=NoTracks)
    """Worker k notes what it does on track k."""
    step_timeout: float = 120.0
    """Seconds without a sign of life after which a worker that should be stepping is taken for stuck."""
    max_failures: int = 100
    on_nan: Literal["continue", "stop"] = "stop"
    report: Callable[[Incident], None] = _ignore
    """Called for every failure of a worker, from any thread."""
    acceleration: Acceleration = "auto"
    """On a GPU, of environments that are tensors: as that of the algorithm."""
    start: Start = field(default_factory=Start)
    room: Room | None = None
    """With --adapt: how far a mode may be moved while it runs."""

    @property
    def most_workers(self) -> int:
        """That there may ever be: episodes are dealt out to so many, and memory is there for so many."""
        return self.num_workers if self.room is None else max(self.num_workers, self.room.most_workers)


@dataclass(frozen=True)
class ModeOptions:
    """The settings of one mode: its fields become flags. What follows from them, where a mode says nothing else:"""

    @property
    def num_workers(self) -> int | None:
        """Workers, where the mode's own settings say how many."""
        return None

    @property
    def unit_steps(self) -> int | None:
        """Steps of one unit that is handed over, where the mode fixes it: a natural amount to learn from at a time."""
        return None

    def check(self, demand: Demand) -> None:
        """Whether an algorithm that demands this can be served: any can."""
