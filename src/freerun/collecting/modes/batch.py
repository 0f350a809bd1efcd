"""`batch` (v2): one collector and a queue of batches; when the queue is full the collector waits, and drops nothing."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.collecting.scheduling.segment_rounds import SegmentRounds, refuse_episodes
from freerun.collecting.scheduling.units import SKIP_EPISODES, SegmentUnits
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.slot_workers import SegmentSlotProcesses
from freerun.core import (
    CollectorSettings,
    Common,
    Demand,
    EnvFactory,
    HandedOver,
    ModeOptions,
    ModeTraits,
    Policy,
    Predictor,
    ProbeModel,
    TensorVariant,
    UserError,
    require_positive,
)


@dataclass(frozen=True)
class BatchConfig(ModeOptions):
    """Mode `batch`: the size of a batch, and how many batches may wait."""

    num_envs: Common[int] = 64
    """Environments, all stepped by one collector."""
    num_steps_per_env: Common[int] = 24
    """Steps of each environment in a batch."""
    max_queue_size: int = 10
    """Batches that may wait for the learner; when the queue is full, or --max-lag is reached, the collector waits."""

    def __post_init__(self) -> None:
        require_positive(self, "num_envs", "num_steps_per_env", "max_queue_size")

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def unit_steps(self) -> int:
        return self.num_envs * self.num_steps_per_env

    def envs_at_once(self, num_workers: int) -> int:
        return self.num_envs

    def check(self, demand: Demand) -> None:
        """Raise if an algorithm that demands this cannot be served."""
        refuse_episodes(demand, "batch")


class Batch(WorkerFleet):
    """Rounds of segments with a queue, over one process with shared memory. Training goes on after a failure."""

    traits = ModeTraits(
        description="one collector gathers the next batch of steps while the learner works on the last; drops nothing "
        "(alias v2)",
        aliases=("v2",),
        options=BatchConfig,
        hands_over=HandedOver.SEGMENTS,
        deterministic=False,
        workers_flag=None,
        resizable=frozenset({"max_queue_size"}),
        tensors=TensorVariant(
            "freerun.collecting.tensors.tensor_modes:TensorBatch", resizable=frozenset({"max_queue_size"})
        ),
        preference=3,
        probe=ProbeModel(Predictor.BATCHES),
        bench_settings=lambda num_envs, steps_per_env: {"num_envs": num_envs, "num_steps_per_env": steps_per_env},
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: BatchConfig):
        if settings.num_workers != 1:
            raise UserError(
                f"--mode batch has one collector, not {settings.num_workers} workers: leave --num-workers out, "
                "or choose --mode continuous --num-collectors"
            )
        rounds = SegmentRounds(1, settings.max_lag, config.unit_steps, config.max_queue_size, settings.start)
        units = SegmentUnits(rounds.accounting, SKIP_EPISODES)
        steps_per_env = config.num_steps_per_env
        place = SegmentSlotProcesses(factory, policy, settings, config.num_envs, steps_per_env, rounds.accounting)
        super().__init__(settings, config, rounds, units, place)
        segments = self.segment_tunable(place, lambda steps: rounds.set_unit_steps(steps * config.num_envs))
        self.own_tunables = [self.queue_tunable(rounds), segments]
        self.start()
