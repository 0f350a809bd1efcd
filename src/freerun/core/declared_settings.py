"""Settings: the mark of those that --help shows, what every collector is built with, and what a mode or an environment
adds as flags of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import gymnasium

from freerun.core.accounting import Incident, NoTracks, StartPoint, Tracks
from freerun.core.data import Demand, Metrics
from freerun.core.seeds import RunSeed

Setting = TypeVar("Setting")
COMMON = "shown by --help"
Common = Annotated[Setting, COMMON]
"""Marks a setting that most people need, as in `learning_rate: Common[float] = 3e-4`. `freerun train --help` shows the
common settings, and `--help-all` shows all of them."""
EnvTarget = str | Callable[..., gymnasium.Env[Any, Any]]
"""What an environment is made by: its Gymnasium id, `module:callable`, or a callable."""
Baseline = Callable[[gymnasium.Env[Any, Any], RunSeed, int], list[float]]
"""A policy that learns nothing: it plays a number of episodes of a seed and returns their returns."""

Acceleration = Literal["auto", "none", "graph", "compile"]
"""How repeated steps run on a GPU: graph records them as CUDA graphs, compile also fuses their kernels before that."""


@dataclass(frozen=True)
class TuningBounds:
    """The largest values that --adapt may give to the settings of a mode."""

    max_workers: int
    max_envs_per_worker: int = 1
    max_queue_size: int | None = None
    """If None, the mode derives it from the configured size."""


def _ignore(incident: Incident) -> None:
    """The `report` of collectors whose incidents nobody wants."""


@dataclass(frozen=True)
class CollectorSettings:
    """What every collector is built with, whatever its mode."""

    num_workers: int
    max_lag: int | None
    """The lag budget in updates. With None, workers wait only if there is no space for what they would collect."""
    seed: RunSeed
    deterministic: bool = False
    tracks: Tracks = field(default_factory=NoTracks)
    """Worker k notes on track k what it does."""
    step_timeout: float = 120.0
    """Seconds without a sign of life after which a worker that should be stepping counts as stuck."""
    max_failures: int = 100
    on_nan: Literal["continue", "stop"] = "stop"
    report: Callable[[Incident], None] = _ignore
    """Called for every failure of a worker. The call may come from any thread."""
    acceleration: Acceleration = "auto"
    """How environments that are tensors are stepped on a GPU; the same setting as the algorithm's."""
    start: StartPoint = field(default_factory=StartPoint)
    tuning_bounds: TuningBounds | None = None
    """How far --adapt may change the mode while it runs; None without --adapt."""
    time_limit: int | None = None
    """The largest number of steps of an episode; None if the environment has no limit."""
    mode: str = ""
    """The name by which the user has chosen the mode, for messages."""

    @property
    def max_workers(self) -> int:
        """The largest number of workers this run may grow to. Memory and episode numbers are reserved for this many."""
        return self.num_workers if self.tuning_bounds is None else max(self.num_workers, self.tuning_bounds.max_workers)


@dataclass(frozen=True)
class ModeOptions:
    """The settings of one mode: its fields become flags. A mode overrides the properties that its settings decide."""

    @property
    def num_workers(self) -> int | None:
        """The number of workers, if the settings of the mode decide it."""
        return None

    @property
    def unit_steps(self) -> int | None:
        """Steps of one unit that is handed over, if the mode fixes it: a natural amount to learn from at a time."""
        return None

    @property
    def segment_steps(self) -> int | None:
        """Steps of a segment, if the settings cut episodes into segments; 0 or None for whole episodes."""
        return None

    @property
    def envs_per_worker(self) -> int:
        """Environments that a worker steps in turn, with one call of the policy for all of them."""
        return 1

    def envs_at_once(self, num_workers: int) -> int:
        """Return how many environments run at the same time."""
        return num_workers * self.envs_per_worker

    @property
    def rates_segments(self) -> bool:
        """True if the mode asks the algorithm how much there is to learn from each segment."""
        return False

    @property
    def acts_on_device(self) -> bool:
        """True if the learner's process chooses all actions, with the policy's network on the learner's device."""
        return False

    def check(self, demand: Demand) -> None:
        """Raise UserError if the mode cannot serve an algorithm with this demand. By default it can serve all."""


@dataclass(frozen=True)
class EnvSettings:
    """Settings of one environment. The fields of a subclass become flags and keys of config.json for it alone.

    The catalog names the subclass of each environment that has one. This base class serves all other environments.
    """

    series_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that list the trainings of a series. The first one takes their names; messages call them by it."""
    trial_columns: ClassVar[Mapping[str, str]] = {"trial_return": "{:.1f}"}
    """The figures of `trial_figures`, and how the table of a series writes each of them."""

    def recipe(self, env: EnvTarget, env_args: Mapping[str, Any]) -> tuple[EnvTarget, dict[str, Any]]:
        """Return what builds the environment, and all of its arguments."""
        return env, dict(env_args)

    def series(self) -> Mapping[str, EnvSettings]:
        """Return the settings of each training by its name, where several trainings follow each other."""
        return {}

    def trial_figures(self, env: gymnasium.Env[Any, Any], episode_return: float) -> Metrics:
        """Judge the episode that was just played on `env`, for the table of a series."""
        return {"trial_return": episode_return}

    def baselines(self) -> Mapping[str, Baseline]:
        """Return the policies that `freerun eval --compare` plays beside the trained one."""
        return {}
