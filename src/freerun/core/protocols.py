"""Who does what: policies act, collectors collect, algorithms learn, sinks write metrics."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from freerun.core.accounting import Counts, StartPoint, State
from freerun.core.data import AnySegment, Array, Demand, FloatArray, Metrics

if TYPE_CHECKING:  # workers never import torch
    import torch
    from torch import Tensor


Thing = TypeVar("Thing")


class Decision(NamedTuple):
    """What a policy has chosen for a batch of observations."""

    action: Array
    head: FloatArray
    """The output of the network's last layer, such as logits. `Policy.log_prob` computes the log-probabilities of a
    whole segment from it in one call, which is cheaper than one call per step."""


class TensorActor(Protocol):
    """A policy that acts on tensors, on the device of a simulator."""

    generator: torch.Generator

    def load(self, weights: FloatArray) -> None: ...

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions for [N, ...] observations, and their log-probabilities."""
        ...


@runtime_checkable
class MemoryTensorActor(TensorActor, Protocol):
    """A `MemoryPolicy` on the device of a simulator."""

    memory_size: int

    def act_from(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Act as `act` does, and replace the memories [N, memory_size] by those after this step, in place."""
        ...


class Policy(Protocol):
    """The part of an algorithm that travels to the workers: it turns observations into actions."""

    weights: FloatArray
    """All weights and normaliser statistics in one flat buffer. `Collector.publish` sends it to the workers."""
    head_size: int
    """How many numbers `Decision.head` has for each action."""

    @property
    def arrays(self) -> Mapping[str, FloatArray]:
        """The weights and statistics by name, as policy.safetensors holds them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what it takes, besides the arrays, to build this policy again."""
        ...

    def load(self, weights: FloatArray) -> None:
        """Copy weights that another process has published."""
        ...

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        """Draw the noise for this number of actions, [num_steps, ...]. One long draw equals two short ones."""
        ...

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        """Choose actions for a batch of observations. Without noise they are the most likely ones."""
        ...

    def single(self) -> Callable[[Array, FloatArray, FloatArray], Any]:
        """Return a fast `act` for one observation: (obs, noise, head to fill) -> action.

        The function holds the weights of this moment. Callers ask for a new one after each `load`."""
        ...

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Return the log-probabilities of actions that the loaded weights have chosen, [N, ...] -> [N]."""
        ...

    def on(self, device: torch.device, seed: int) -> TensorActor:
        """Return the same policy for observations that are tensors. It samples with a generator of its own."""
        ...


class MemoryPolicy(Policy, Protocol):
    """A policy whose actions also depend on what it has seen before in the episode (`--memory`).

    Whoever steps environments keeps the memory of each: `memory_size` numbers, all 0 when an episode begins. `act` and
    `single` are for observations at that point.
    """

    memory_size: int

    def act_from(self, obs: Array, noise: FloatArray | None, memory: FloatArray) -> Decision:
        """Act as `act` does, and replace the memories [B, memory_size] by those after this step."""
        ...

    def single_from(self, memory: FloatArray) -> Callable[[Array, FloatArray, FloatArray], Any]:
        """Return a fast `act_from` for one observation, as `single` does. It keeps the memory in this array."""
        ...


def as_memory_policy(policy: Policy) -> MemoryPolicy | None:
    """Return a policy as one with a memory; None if it has none.

    `isinstance` would not do: since Python 3.12 it does not see what a policy passes on from one that it wraps.
    """
    return cast(MemoryPolicy, policy) if getattr(policy, "memory_size", 0) else None


def empty_memory(policy: Policy, num_envs: int) -> FloatArray | None:
    """Return the memory of environments whose episodes begin; None for a policy without a memory."""
    remembering = as_memory_policy(policy)
    return None if remembering is None else np.zeros((num_envs, remembering.memory_size), np.float32)


@runtime_checkable
class BatchablePolicy(Policy, Protocol):
    """A policy whose network can run on the learner's device, for all environments of a mode at once."""

    def batched_on(self, device: str) -> Policy:
        """Return the same policy with its network there. It chooses the same actions, up to rounding."""
        ...


class Collector(Protocol):
    """A mode, as users choose it with --mode: where workers live, what they hand over, who waits for whom."""

    num_workers: int

    def counts(self) -> Counts:
        """Return what was counted so far."""
        ...

    def publish(self, weights: FloatArray, version: int) -> None:
        """Give the workers new weights, and permission to collect as far ahead of this version as the lag allows."""
        ...

    def collect(self, demand: Demand) -> Sequence[AnySegment]:
        """Wait until the demand is met, then return; an empty demand takes what has already arrived."""
        ...

    def close(self) -> None: ...


class ReusableCollector(Collector, Protocol):
    """A collector whose workers can serve several trainings, one after another."""

    def renew(self, start: StartPoint) -> None:
        """Begin another training, with the episode numbers and counts of this start."""
        ...


@dataclass(frozen=True)
class Tunable:
    """A setting that may change while a run goes on, and how far."""

    name: str
    read: Callable[[], float]
    """The value in force now."""
    apply: Callable[[float], None]
    """Sets another value. It may return before the value is in force everywhere."""
    low: float
    high: float
    is_whole: bool = True
    """Whether only whole numbers make sense."""
    is_settled: Callable[[], bool] = lambda: True
    """Whether the last value that was applied is in force."""
    between_updates: bool = False
    """Whether only the learner may apply a value, and only between two updates."""

    def fit(self, value: float) -> float:
        """Return the nearest value within the bounds."""
        value = min(self.high, max(self.low, value))
        return float(round(value)) if self.is_whole else value

    def scaled(self, value: float, factor: float) -> float:
        """`value` times `factor`, rounded away from `value` and within the bounds."""
        wanted = value * factor
        if self.is_whole:
            # Rounded to the nearest, a small number such as 1 · 1.25 would never change.
            wanted = math.ceil(wanted) if factor > 1 else math.floor(wanted)
        return self.fit(wanted)


class PriorityCollector(Collector, Protocol):
    """A mode that keeps the segments which matter most to the algorithm: --queue-priority td-error."""

    def prefer(self, importance: Callable[[Any], float]) -> None:
        """Ask this function how important a segment is. It takes the kind of segments that the mode hands over."""
        ...


class TunableCollector(Collector, Protocol):
    """A mode with settings that --adapt can change while it runs."""

    def tunables(self) -> list[Tunable]: ...


class StuckWatch(Protocol):
    """Notices a simulator that no longer answers."""

    when_stuck: Callable[[Exception], None] | None
    """Called on a thread of the watch, because the thread of the simulator cannot go on."""


@runtime_checkable
class SimulatorCollector(Collector, Protocol):
    """A mode that steps simulators in this process, as tensors."""

    @property
    def simulator_watch(self) -> StuckWatch: ...

    @property
    def simulator_log(self) -> Gauge:
        """The simulators' own metrics, for the record of an update."""
        ...

    def evaluate(self, policy: Policy, num_episodes: int) -> list[float]:
        """Play new episodes on the simulator that trains, and return their returns. Training then begins new ones."""
        ...


@runtime_checkable
class SimulatorThreadCollector(Collector, Protocol):
    """A mode whose simulator must stay on the thread that made it: the learner moves to another."""

    def run_with_learner(self, learn: Callable[[], None]) -> None:
        """Collect on this thread until `learn`, on a thread and a CUDA stream of its own, has ended."""
        ...


class Algorithm(Protocol):
    """Learns from segments. It declares how much data it needs, and never calls an environment."""

    policy: Policy

    def demand(self) -> Demand:
        """Return what is missing before the next update."""
        ...

    def observe(self, segments: Sequence[AnySegment]) -> None:
        """Take segments to learn from."""
        ...

    def update(self, version: int, progress: float) -> Metrics:
        """Learn from what was observed. `version` counts updates so far, `progress` goes from 0 to 1 over the run.

        The last update of a run may get less than was demanded, because a run ends at --total-steps."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class WarmStartable(Algorithm, Protocol):
    """An algorithm that can start a run with what another run has learned (--init-from)."""

    learned: ClassVar[tuple[str, ...]]
    """The parts of `state_dict()` that were learned, as paths such as agent/actor: networks and normalisers, but no
    counters, no data and no generators."""

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimisers by their path in `state_dict()`, for --init-optimizer."""
        ...


class ProximalAlgorithm(Algorithm, Protocol):
    """An algorithm that can keep its weights near some others while it learns: its trait `has_proximal_term`."""

    def stay_near(self, strength: float) -> None:
        """From now on, add `strength` · (w - w_now) to every gradient, where w_now are the weights of this moment.
        With 0, add nothing."""
        ...


class WeightExchange(Protocol):
    """Lets a run share what it learns with others, between an update and the publication of its weights.

    So workers act only with the weights that the exchange has left in the algorithm.
    """

    def __call__(self, algorithm: Algorithm, steps: int, mean_return: float) -> None:
        """Called before the first weights are published, and after every update. `steps` are those of the run so far,
        `mean_return` is that of its last episodes."""
        ...


class BackgroundWork(Protocol):
    """A stage of an algorithm that runs in a thread beside the learner."""

    thread: threading.Thread | None
    note: Callable[[State], None]
    """Called with what the stage does now; the timeline shows it."""

    @property
    def is_busy(self) -> bool: ...

    def ends_within(self, seconds: float) -> bool: ...

    def finish(self) -> object:
        """Wait for the work that goes on; what it has raised is raised here."""
        ...


@runtime_checkable
class StagedAlgorithm(Algorithm, Protocol):
    """An algorithm with stages that run beside the learner: its trait `has_stages`."""

    @property
    def stages(self) -> Mapping[str, BackgroundWork]:
        """By their names on the timeline; empty if all of them take turns."""
        ...


@runtime_checkable
class FollowingAlgorithm(Algorithm, Protocol):
    """An algorithm with stages that run beside the learner, so that its updates depend on the clock, and that can be
    replayed all the same: its metrics say what the clock has decided."""

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Make the next update as the one with these metrics was made."""
        ...


def background_stages(algorithm: Algorithm) -> Mapping[str, BackgroundWork]:
    """Return the stages of an algorithm that run beside the learner, by name."""
    return algorithm.stages if isinstance(algorithm, StagedAlgorithm) else {}


class RatingAlgorithm(Algorithm, Protocol):
    """An algorithm that can say how much there is to learn from a segment: its trait `rates_segments`."""

    def importance(self, segment: AnySegment) -> float: ...


class LearnerGroup(Protocol):
    """The learners of a run that update together, as one of them sees them.

    All of them must make the same calls in the same order, because a call waits for the others.
    """

    index: int
    count: int

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all learners. Everyone gets the same bits."""
        ...

    def gather(self, thing: Thing) -> list[Thing]:
        """Return what each learner has passed, ordered by their index."""
        ...


class SingleLearner:
    """A group of one learner: its sums and its lists hold nothing but its own."""

    index = 0
    count = 1

    def sum(self, tensor: Tensor) -> None:
        """Leave the tensor as it is: the sum over one learner."""

    def gather(self, thing: Thing) -> list[Thing]:
        return [thing]


class Gauge(Protocol):
    """Measures something besides the learning, such as the load of the machine, for the record of each update."""

    def read(self, step: int) -> Metrics: ...

    def close(self) -> None: ...


class MetricSink(Protocol):
    """Takes the metrics of each update: a file, a display, a tracker."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
