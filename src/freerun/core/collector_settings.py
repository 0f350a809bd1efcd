"""The settings of a mode: what every collector is built with, and what one mode adds as flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from freerun.core.accounting import Incident, NoTracks, StartPoint, Tracks
from freerun.core.data import Demand
from freerun.core.seeds import RunSeed

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
        """Steps of a segment, if the settings cut episodes into segments; None for whole episodes."""
        return None

    @property
    def envs_per_worker(self) -> int:
        """Environments that a worker steps in turn, with one call of the policy for all of them."""
        return 1

    @property
    def rates_segments(self) -> bool:
        """True if the mode asks the algorithm how much there is to learn from each segment."""
        return False

    def check(self, demand: Demand) -> None:
        """Raise UserError if the mode cannot serve an algorithm with this demand. By default it can serve all."""
