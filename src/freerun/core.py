"""The vocabulary of freerun: what travels between environments, workers and the learner. Read this first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

if TYPE_CHECKING:  # workers do without torch
    import torch
    from torch import Tensor

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Metrics = dict[str, float]
Acceleration = Literal["auto", "none", "graph", "compile"]
"""On a GPU: whether steps that are done again and again are recorded as CUDA graphs, and their kernels fused before."""
ActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


class UserError(Exception):
    """Bad input, told in one sentence that says what to do. The command line prints it and exits with 2."""


class EnvFailure(Exception):
    """An environment raised: the text holds its own traceback and the episode's seed."""

    worker: int | None = None
    from_outside = False
    """Whether the environment had no part in it, as far as anybody can tell."""


class WorkerDied(EnvFailure):
    """Its process ended without a word."""


class OutOfMemory(WorkerDied):
    """The kernel took its process, for lack of memory."""


class WorkerHung(EnvFailure):
    """It showed no sign of life for longer than the step timeout."""


class LearnerFailure(Exception):
    """Another of several learners failed, or is gone: the text says which and why."""


class NotFinite(UserError):
    """NaN or infinity, in what an environment returned, a policy chose or a learner computed."""

    episode: int | None = None
    seed: int | None = None
    step: int | None = None
    evidence: Segment | None = None
    """The steps of the episode up to there, as far as they are at hand."""


def import_callable(name: str, what: str) -> Callable[..., Any]:
    """The function or class that a user has named as module:callable."""
    module_name, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {name!r}: {error}; is its folder on PYTHONPATH?") from None
    except AttributeError:
        advice = " (a script's own; put it into a module to use it from elsewhere)" if module_name == "__main__" else ""
        raise UserError(f"{what} {name!r}: module {module_name!r} has no {attribute!r}{advice}") from None
    if not callable(target):
        raise UserError(f"{what} {name!r} is not callable: name a class or a function that returns one")
    return target  # type: ignore[no-any-return]


def callable_name(target: str | Callable[..., Any]) -> str:
    """The reverse of `import_callable`, for what was given as an object."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


# ---------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True)
class EnvSpec:
    """What an algorithm must know of an environment."""

    observation_space: spaces.Box
    action_space: ActionSpace
    reports_final_obs: bool = True
    """False where an environment resets itself and hides the last observation of an episode."""

    @property
    def action_shape(self) -> tuple[int, ...]:
        return self.action_space.shape or ()


class StepResult(NamedTuple):
    """One step of B environments. The arrays belong to the environment and are overwritten by the next step."""

    obs: Array
    """What to act on next: where an environment resets itself, the first observation of the next episode."""
    final_obs: Array
    """The successor of the step: where an episode ended, its last observation."""
    reward: Array
    terminated: Array | Sequence[bool]
    truncated: Array | Sequence[bool]


class VectorEnv(Protocol):
    """B environments stepped together. One whose episode has ended rests until it is reset."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: Sequence[int | None]) -> Array:
        """Start a new episode where a seed is given, leave the others alone; return all observations."""
        ...

    def step(self, action: Array) -> StepResult: ...

    def close(self) -> None: ...


class EnvFactory(Protocol):
    """Builds environments where they are needed; travels to the workers."""

    @property
    def spec(self) -> EnvSpec: ...

    def make_lane(self) -> gymnasium.Env[Any, Any]:
        """One environment with the spaces of `spec`."""
        ...

    def make(self, num_envs: int) -> VectorEnv:
        """Environments stepped one after another in this process."""
        ...

    def make_parallel(self, num_envs: int, tracks: Tracks, step_timeout: float) -> VectorEnv:
        """Environments in a process each, stepped together; each notes on its track when it is busy, and one that takes
        longer than that for a step has failed."""
        ...


class TensorStep(NamedTuple):
    """One step of N environments as tensors on their device, which are theirs and overwritten by the next step."""

    obs: Tensor
    final_obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class TensorEnv(Protocol):
    """N environments stepped as one batch of tensors. Where an episode ends, the next one begins in the same step."""

    spec: EnvSpec
    num_envs: int
    device: torch.device
    is_capturable: bool
    """Whether a step can be recorded as part of a CUDA graph: no question to the device, all state written in place."""

    def reset(self) -> Tensor:
        """Begin anew everywhere; the first observations."""
        ...

    def step(self, action: Tensor) -> TensorStep: ...

    def metrics(self) -> Metrics:
        """What the simulator has logged of itself since the last call."""
        ...

    def close(self) -> None: ...


SERIES_BITS = 40
"""Episodes of the k-th training over one pool of workers are numbered from k · 2^40 on: so the workers need not be told
that another training has begun."""
SERIES_SEED_BITS = 32
"""And their environments are reset with seeds whose bits from here on are k: that is how they know which one it is."""


class SharedSeed(NamedTuple):
    """The seed of a run with several learners: each plays every `num_learners`-th episode and counts its own."""

    run_seed: int
    learner: int
    num_learners: int

    def number(self, episode: Any) -> Any:
        """An episode's number in the run."""
        return episode * self.num_learners + self.learner


RunSeed = int | SharedSeed


def episode_seed(run_seed: RunSeed, episode: int) -> int:
    """The seed that the environment of an episode is reset with (decision 5: randomness belongs to the episode)."""
    seed = int(np.random.SeedSequence(_in_run(run_seed, episode)).generate_state(1)[0] >> 1)
    return episode >> SERIES_BITS << SERIES_SEED_BITS | seed


def episode_rng(run_seed: RunSeed, episode: int) -> np.random.Generator:
    """The generator that samples an episode's actions."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_in_run(run_seed, episode), 1))))


def _in_run(run_seed: RunSeed, episode: int) -> tuple[int, int]:
    """The run's seed, and the episode's number in its own training, which thus meets the same episodes as if it were
    the only one."""
    number = episode & (1 << SERIES_BITS) - 1
    if isinstance(run_seed, SharedSeed):
        return run_seed.run_seed, run_seed.number(number)
    return run_seed, number


# ---------------------------------------------------------------------------------------------- data


@dataclass
class Segment:
    """Consecutive steps of B environments, arrays shaped [T, B, ...]; an episode is a segment with B = 1."""

    obs: Array
    action: Array
    log_prob: FloatArray
    """Under the weights that chose the action (the behaviour policy)."""
    reward: FloatArray
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next_obs: Array
    """The true successor; never the first observation of another episode."""
    version: NDArray[np.int64]
    episode: NDArray[np.int64]
    """Its number; −1 − number where steps of the episode are missing before this one (a queue has dropped them, or
    hands them over later), so that nobody takes its return and length for those of a whole one."""
    seconds: float
    """Wall time that the worker spent on it."""

    @property
    def num_steps(self) -> int:
        return int(self.reward.size)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated

    def copy(self) -> Segment:
        """Arrays of its own, for a segment whose arrays will be overwritten."""
        arrays = {name: getattr(self, name).copy() for name in SEGMENT_ARRAYS}
        return Segment(**arrays, seconds=self.seconds)

    def part(self, start: int, stop: int, column: int) -> Segment:
        """Some steps of one lane, in arrays of their own."""
        arrays = {name: getattr(self, name)[start:stop, column : column + 1].copy() for name in SEGMENT_ARRAYS}
        return Segment(**arrays, seconds=self.seconds)


SEGMENT_ARRAYS = tuple(field.name for field in fields(Segment) if field.name != "seconds")


@dataclass
class TensorSegment:
    """The same from environments that are tensors, [T, N, ...] on their device; one version chose all its actions."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Tensor
    episode_return: Tensor
    """Of the episode up to and including each step."""
    episode_length: Tensor
    version: int
    seconds: float

    @property
    def num_steps(self) -> int:
        return self.reward.numel()

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


AnySegment = Segment | TensorSegment


@dataclass(frozen=True)
class Demand:
    """What an algorithm needs before its next update; empty means "update now".

    Given both, so many episodes are what the steps have been found to come to.
    """

    episodes: int = 0
    steps: int = 0
    whole_episodes: bool = True
    """Where False, parts of episodes will do: what is missing of them comes with later demands."""
    next_steps: int | None = None
    """Steps of the next demand, where it is known to be another: so much may be collected ahead for each update of
    allowed lag."""

    def __bool__(self) -> bool:
        return self.episodes > 0 or self.steps > 0


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
        """`act` for one observation, as a function with all it needs at hand: (obs, noise, head to fill) -> action."""
        ...

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Of the actions that the loaded weights have chosen, [N, ...] -> [N]."""
        ...

    def on(self, device: torch.device, seed: int) -> TensorActor:
        """The same policy for observations that are tensors; it samples with its own generator."""
        ...


class Ring:
    """Rows in the order they came, of which the last `capacity` are there: as part of a state, only new ones are kept.

    `columns` are arrays or tensors [capacity, ...] in which row n lies at n % capacity.
    """

    def __init__(self, columns: Mapping[str, Any], total: int):
        self.columns = columns
        self.total = total
        """Rows that ever came."""
        self.capacity = len(next(iter(columns.values())))

    @property
    def first(self) -> int:
        """The oldest row that is there."""
        return max(0, self.total - self.capacity)

    def pieces(self, first: int | None = None, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows from `first` to `stop`, oldest first, as the number of a piece's first row and its columns."""
        first, stop = self.first if first is None else first, self.total if stop is None else stop
        while first < stop:
            place = first % self.capacity
            num_rows = min(stop - first, self.capacity - place)
            yield first, {name: column[place : place + num_rows] for name, column in self.columns.items()}
            first += num_rows


# ---------------------------------------------------------------------------------------------- the three roles


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


def _ignore(incident: Incident) -> None:
    """For collectors that nobody asked to tell."""


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
