"""What a mode, an algorithm or a tracker declares about itself.

Each class has an attribute `traits`. The rest of freerun asks these traits and never compares names, so a new mode,
algorithm or tracker needs no change elsewhere. Classes of the user's own declare the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from gymnasium import spaces

from freerun.core.declared_settings import ModeOptions
from freerun.core.errors import UserError

ComputedBy = Literal["torch", "numpy", "kernel"]
"""Who computes gradients: torch, numpy with the derivatives written out, or the same in C, where the number of threads
changes no result."""


@dataclass(frozen=True)
class RequiredPackage:
    """A package that freerun itself does not depend on."""

    module: str
    """The name under which Python imports it."""
    name: str
    """The name that people know it by."""
    extra: str
    """The extra of freerun that installs it: pip install 'freerun[extra]'."""
    also: tuple[str, ...] = ()
    """Other modules that must be there too, because the package can be installed without them."""

    @property
    def is_installed(self) -> bool:
        # This looks for packages without importing them, which may take seconds.
        return all(importlib.util.find_spec(module) is not None for module in (self.module, *self.also))

    @property
    def advice(self) -> str:
        return f"pip install 'freerun[{self.extra}]'"

    def require(self, what: str) -> None:
        """Refuse `what`, such as --track wandb, if the package is missing."""
        if not self.is_installed:
            raise UserError(f"{what} needs {self.name}: {self.advice}")


# ---------------------------------------------------------------------------------------------- modes


class HandedOver(Enum):
    """The unit of data that a worker hands over to the learner."""

    EPISODES = "whole episodes"
    EPISODES_OR_SEGMENTS = "whole episodes, or segments if --segment-steps is given"
    SEGMENTS = "segments of a fixed number of steps"


class WorkerLocation(Enum):
    """Where the workers of a mode live."""

    THIS_PROCESS = "the learner's process"
    PROCESSES = "processes of this machine"
    THREADS_OR_PROCESSES = "threads of the learner's process, or processes of this machine"
    CLUSTER = "any number of machines"


class Pacing(Enum):
    """Who waits for whom."""

    TAKES_TURNS = "collecting and learning alternate, so there is never any lag"
    BOUNDS_LAG = "workers collect while the learner updates, and wait where --max-lag is reached"
    DROPS_STEPS = "workers never wait, so no --max-lag can be kept; the oldest data is dropped"


class FollowerStart(Enum):
    """How the first learner starts the other learners of a run (--num-learners)."""

    LOCAL_PROCESSES = "as processes of this machine"
    RAY_TASKS = "as tasks of the Ray cluster that the workers use"


class Predictor(Enum):
    """The formula or simulation by which a probe predicts the speed of a mode."""

    ALTERNATING = "one environment, stepped in turns with the learner"
    LOCKSTEP = "every step waits for the slowest environment, in turns with the learner"
    SCHEDULED_UNITS = "each worker plays episodes or segments by itself, as far as the schedule allows"
    BATCHES = "one collector gathers batches of --num-envs times --num-steps-per-env for a queue of --max-queue-size"
    DROPPING_QUEUE = "--num-collectors collectors share --num-envs environments and never wait"


@dataclass(frozen=True)
class ProbeModel:
    """What `freerun probe` needs in order to predict a mode."""

    predictor: Predictor
    overhead_of: str | None = None
    """The mode whose measured overhead is used, for a mode that is too slow to start in a probe. The two numbers below
    are added to it."""
    worker_seconds_per_unit: float = 0.0
    """Processor time that handing over one unit costs a worker, beyond the measured overhead."""
    learner_seconds_per_unit: float = 0.0
    """Processor time that receiving one unit costs the learner, beyond the measured overhead."""


def _segments_of_all(num_envs: int, steps_per_env: int) -> dict[str, int]:
    return {"num_envs": num_envs, "num_steps_per_env": steps_per_env}


@dataclass(frozen=True)
class TensorVariant:
    """How a mode steps environments that are tensors."""

    target: str
    """The class, as module:Class. It is named and not imported, because it needs torch."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """The mode's settings that are filled in here if the user leaves them open."""
    own_settings: tuple[str, ...] = ()
    """The mode's settings that no other environments have."""
    resizable: frozenset[str] = frozenset()
    """As in `ModeTraits`: what --adapt may change here. Simulators cannot be added while a run goes on."""
    bench_settings: Callable[[int, int], dict[str, int]] = _segments_of_all
    """From a number of environments and the steps of each per update to the mode's settings, for `freerun bench`."""


def _one_worker_per_env(num_envs: int, steps_per_env: int) -> dict[str, int]:
    return {"num_workers": num_envs}


@dataclass(frozen=True)
class ModeTraits:
    """What the rest of freerun must know about a mode. The defaults describe a mode such as `pipes`."""

    description: str = ""
    """One line for `freerun list`. (If empty: the first line of the class's docstring.)"""
    aliases: tuple[str, ...] = ()
    """Other names that users may type; config.json records the real name."""
    options: type[ModeOptions] = ModeOptions
    """The dataclass of the mode's own settings, which become flags. A mode that has some takes them as the fourth
    argument of its constructor."""
    hands_over: HandedOver = HandedOver.EPISODES
    """The unit of data that a worker hands over."""
    workers: WorkerLocation = WorkerLocation.PROCESSES
    """Where the workers live."""
    pacing: Pacing = Pacing.BOUNDS_LAG
    """Who waits for whom: the mode takes turns, bounds its lag, or drops steps."""
    deterministic: bool = True
    """--deterministic is possible: the same seed gives the same weights, bit for bit, with any number of workers."""
    lockstep: bool = False
    """All environments step together, so the policy acts on one observation of each at a time."""
    workers_flag: str | None = "--num-workers"
    """The flag that sets the number of workers; None if there is always one. A flag other than --num-workers belongs to
    `options`."""
    resizable: frozenset[str] = frozenset()
    """The settings that --adapt may change while a run goes on: num_workers, envs_per_worker, max_queue_size. Empty if
    --adapt cannot be used; otherwise the collector is a `TunableCollector`."""
    tensors: TensorVariant | None = None
    """How the mode steps environments that are tensors; None if it cannot."""
    followers: FollowerStart | None = FollowerStart.LOCAL_PROCESSES
    """How the other learners are started; None if the mode serves a single learner."""
    package: RequiredPackage | None = None
    """A package that must be installed."""
    why_not_auto: str | None = None
    """The reason why `auto` does not pick this mode while another one will do; None if it may."""
    preference: int = 100
    """Among modes that are about as fast, `auto` picks the one with the lowest number."""
    is_reference: bool = False
    """Speeds of other modes are given as multiples of this mode's, and correctness is held against it."""
    probe: ProbeModel | None = None
    """What a probe must model; None if a probe cannot predict the mode."""
    starts_slowly: bool = False
    """`freerun bench` measures the mode last, so that the others are measured if the time runs out."""
    bench_settings: Callable[[int, int], dict[str, int]] = _one_worker_per_env
    """From a number of environments and the steps of each per update to settings with which this mode steps that many
    environments, each by a worker of its own if it can have several."""

    @property
    def takes_turns(self) -> bool:
        return self.pacing is Pacing.TAKES_TURNS

    @property
    def never_waits(self) -> bool:
        return self.pacing is Pacing.DROPS_STEPS

    @property
    def whole_episodes(self) -> bool:
        """True if workers can hand over whole episodes."""
        return self.hands_over is not HandedOver.SEGMENTS


# ---------------------------------------------------------------------------------------------- algorithms


@dataclass(frozen=True)
class RunScale:
    """How large a run is, as far as an algorithm's defaults depend on it."""

    num_envs: int = 1
    """The environments that run at the same time."""
    unit_steps: int | None = None
    """The steps of a unit that the mode hands over, if it has a fixed size."""
    is_tensors: bool = False
    """The environments are tensors, so a simulator steps all of them at once."""

    @property
    def has_few_envs(self) -> bool:
        """True if all is as for one environment: their whole episodes fit into two updates."""
        return self.num_envs <= 4


@dataclass(frozen=True)
class AlgorithmTraits:
    """What the rest of freerun must know about an algorithm. The settings named here are fields of its config."""

    on_policy: bool = False
    """The algorithm learns only from whole episodes that were collected since its last update. So nothing is left over
    when a training ends, and its workers can serve the next one."""
    action_spaces: tuple[type[spaces.Space[Any]], ...] = (spaces.Space,)
    """The kinds of action space that it can learn."""
    default_max_lag: int | None = 0
    """--max-lag if it is not given; None sets no limit. More than 0 is for algorithms that correct for lag."""
    counts_episodes: bool = False
    """It has a setting `episodes_per_update`, which may be None."""
    counts_steps: bool = False
    """It has a setting `steps_per_update`. A mode that hands over units of a fixed size fills it in if it is None."""
    scaled_defaults: Callable[[Any, RunScale], dict[str, Any]] | None = None
    """From its settings and the scale of a run to the values of those settings that the user has left open (None)."""
    has_stages: bool = False
    """It has a setting `stages` (auto, in-turn, concurrent) and an attribute `stages` with those that run beside the
    learner."""
    has_critic_group: bool = False
    """Its value function can see another group of observations than its policy (`EnvSpec.obs_groups`). Algorithms that
    do not declare this are given the policy's group alone."""
    has_action_mask: bool = False
    """Its policy keeps to masks of discrete actions (`ObsGroups.mask`). Algorithms that do not declare this are given
    observations without masks."""
    rates_segments: bool = False
    """It has a method `importance(segment)`, which --queue-priority td-error needs."""
    has_proximal_term: bool = False
    """It has a method `stay_near(strength)`, which FedProx needs (docs/federated.md)."""
    critic_parts: tuple[str, ...] = ()
    """The beginnings of those paths within `learned` that judge actions and do not choose them, such as net/critic. The
    sites of a federation may keep them to themselves (--share policy)."""
    has_acceleration: bool = False
    """It has a setting `acceleration`: whether its gradient steps are recorded as CUDA graphs."""
    gains_from_gpu: bool = False
    """With its gradient steps recorded, a GPU makes its updates faster whatever their sizes: --device auto takes a GPU
    without a trial, whose first update may take minutes on a CPU."""
    has_network: bool = False
    """It has a setting `network`: a network of the user's own, as module:callable."""
    code_settings: tuple[str, ...] = ()
    """Settings that may name code of the user's own, as module:callable."""
    minibatch_setting: str | None = None
    """The setting that --adapt-max-minibatch lets --adapt raise between two updates. The algorithm has its settings as
    `config`, and its method `reconfigured()` is called when they have changed."""
    update_ratio_setting: str | None = None
    """The setting that --adapt-min-update-ratio lets --adapt lower between two updates, in the same way."""
    larger_minibatch_is_faster: bool = False
    """An update passes over a fixed number of rows, so that it takes less time in larger minibatches. (Where the number
    of gradient steps is fixed, it takes more.)"""
    computed_by: Callable[[Any, str], ComputedBy] | None = None
    """From its settings and the device to who computes its gradients (if None: torch). --learner-threads are theirs
    alone: two groups of threads that wait for work would take each other's cores."""
    learner_note: Callable[[Any, str], str] | None = None
    """From its settings and the device to a few words in the header of a run: who computes the gradients."""
    console_line: Callable[[int, Mapping[str, float]], str] | None = None
    """From the steps so far and an update's metrics to a line of its own for the log on the console."""


# ---------------------------------------------------------------------------------------------- trackers


@dataclass(frozen=True)
class TrackerTraits:
    """What the rest of freerun must know about a tracker."""

    description: str = ""
    """One line for `freerun list`. (If empty: the first line of the class's docstring.)"""
    package: RequiredPackage | None = None
    """A package that must be installed."""
    destination_setting: str | None = None
    """The setting that says to whom or to which machine a run's metrics go. A run folder from elsewhere may set it only
    if the user trusts it."""
    local_destinations: tuple[str, ...] = ()
    """Values of that setting that keep the metrics on this machine, and need no trust."""
