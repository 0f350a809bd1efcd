"""`batch` (v2): one collector beside the learner, and a queue of batches; nothing is dropped, the collector waits."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.collectors.freerun import Freerun, FreerunConfig
from freerun.collectors.segments import SegmentRounds, refuse_episodes
from freerun.core import (
    CollectorSettings,
    Demand,
    EnvFactory,
    ModeOptions,
    Policy,
    Segment,
    UserError,
    require_positive,
)


@dataclass(frozen=True)
class BatchConfig(ModeOptions):
    """Mode `batch`: what a batch is, and how many may wait."""

    num_envs: int = 64
    """Environments, all stepped by one collector."""
    num_steps_per_env: int = 24
    """Steps of each environment in a batch."""
    max_queue_size: int = 10
    """Batches that may wait for the learner; when there are so many, or --max-lag is reached, the collector waits."""

    def __post_init__(self) -> None:
        require_positive(self, "num_envs", "num_steps_per_env", "max_queue_size")

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def unit_steps(self) -> int:
        return self.num_envs * self.num_steps_per_env

    def check(self, demand: Demand) -> None:
        """Whether an algorithm that demands this can be served."""
        refuse_episodes(demand, "batch")


class Batch(Freerun):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: BatchConfig):
        if settings.num_workers != 1:
            raise UserError(
                f"--mode batch has one collector, not {settings.num_workers} workers: leave --num-workers out, "
                "or choose --mode continuous --num-collectors"
            )
        if settings.deterministic:
            raise UserError(
                "--deterministic compares whole episodes, which --mode batch hands over in pieces: "
                "choose --mode freerun (or any other that hands over whole episodes)"
            )
        task = FreerunConfig(config.num_envs, config.num_steps_per_env)
        store = SegmentRounds(1, settings.max_lag, config.unit_steps, config.max_queue_size, settings.start)
        super().__init__(factory, policy, settings, task, store, tolerant=True)

    def collect(self, demand: Demand) -> list[Segment]:
        refuse_episodes(demand, "batch")
        return super().collect(demand)
