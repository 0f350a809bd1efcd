"""`continuous` (v1): collectors that never wait, each with its own environments; a full queue drops the oldest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from freerun.collecting.modes.thread_trial import speed_up_by_threads
from freerun.collecting.scheduling.dropping_queue import DroppingQueue
from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.collecting.scheduling.segment_rounds import refuse_episodes
from freerun.collecting.scheduling.units import SKIP_EPISODES, SegmentUnits
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.slot_workers import SegmentSlotProcesses
from freerun.collecting.workers.thread_workers import WorkerThreads
from freerun.core import (
    CollectorSettings,
    Common,
    Demand,
    EnvFactory,
    HandedOver,
    ModeOptions,
    ModeTraits,
    Pacing,
    Policy,
    Predictor,
    ProbeModel,
    Segment,
    TensorVariant,
    UserError,
    WorkerLocation,
    require_positive,
)

logger = logging.getLogger("freerun")

Kind = Literal["thread", "process"]
DEFAULT_NUM_COLLECTORS = 4
THREADS_PAY_OFF = 1.8
"""Threads are chosen if two of them step at least this many times as fast as one. It is 2 where steps do not hold
Python's lock. At 1.5 (MuJoCo) collectors in threads slowed each other and the learner down."""


@dataclass(frozen=True)
class ContinuousConfig(ModeOptions):
    """Mode `continuous`: its collectors and its queue."""

    num_collectors: Common[int | None] = None
    """Collectors, each with its share of the environments (4 if not given; 1 for environments that are tensors)."""
    num_envs: Common[int] = 64
    """Environments in total: a multiple of the collectors."""
    max_queue_size: int = 1000
    """Collection batches that may wait for the learner; when there are more, the oldest is dropped."""
    collection_batch_size: int = 256
    """Steps that a collector hands over at a time, rounded up to the same number for each of its environments."""
    collector_kind: Literal["auto", "thread", "process"] = "auto"
    """Where a collector runs: in a thread of the learner's process, or in a process of its own (auto: in a thread if
    the environment leaves Python's lock to others while it steps, which is measured)."""
    queue_priority: Literal["none", "rare-lengths", "td-error"] = "none"
    """What the queue keeps and hands over first: the oldest, episodes of rare lengths, or large TD errors."""

    def __post_init__(self) -> None:
        require_positive(self, "num_collectors", "num_envs", "max_queue_size", "collection_batch_size")

    @property
    def num_workers(self) -> int:
        return DEFAULT_NUM_COLLECTORS if self.num_collectors is None else self.num_collectors

    @property
    def envs_per_collector(self) -> int:
        return max(1, self.num_envs // self.num_workers)

    @property
    def num_steps_per_env(self) -> int:
        return math.ceil(self.collection_batch_size / self.envs_per_collector)

    @property
    def unit_steps(self) -> int:
        return self.num_steps_per_env * self.envs_per_collector

    @property
    def rates_segments(self) -> bool:
        return self.queue_priority == "td-error"

    def envs_at_once(self, num_workers: int) -> int:
        return self.num_envs

    def check(self, demand: Demand) -> None:
        """Raise if an algorithm that demands this cannot be served."""
        refuse_episodes(demand, "continuous")


def _bench_settings(num_envs: int, steps_per_env: int) -> dict[str, int]:
    batch_size = min(ContinuousConfig.collection_batch_size, steps_per_env)
    return {"num_collectors": num_envs, "num_envs": num_envs, "collection_batch_size": batch_size}


class Continuous(WorkerFleet):
    """A queue that drops, over processes or threads. Training goes on after a failure."""

    traits = ModeTraits(
        description="collectors that never wait, and a queue that drops the oldest: real time (alias v1)",
        aliases=("v1",),
        options=ContinuousConfig,
        hands_over=HandedOver.SEGMENTS,
        workers=WorkerLocation.THREADS_OR_PROCESSES,
        pacing=Pacing.DROPS_STEPS,
        deterministic=False,
        workers_flag="--num-collectors",
        resizable=frozenset({"num_workers", "max_queue_size"}),
        tensors=TensorVariant(
            "freerun.collecting.tensors.tensor_stream:TensorStream",
            defaults={"num_collectors": 1},
            resizable=frozenset({"max_queue_size"}),
            bench_settings=lambda num_envs, steps_per_env: {
                "num_envs": num_envs,
                "collection_batch_size": num_envs * steps_per_env,
            },
        ),
        why_not_auto="it drops steps and knows no limit to the lag",
        preference=7,
        probe=ProbeModel(Predictor.DROPPING_QUEUE),
        bench_settings=_bench_settings,
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: ContinuousConfig):
        _check(settings, config)
        queue = DroppingQueue(
            settings.max_workers,
            config.max_queue_size,
            prefers_rare_lengths=config.queue_priority == "rare-lengths",
            start=settings.start,
            num_playing=config.num_workers,
        )
        self.kind: Kind = _choose_kind(factory) if config.collector_kind == "auto" else config.collector_kind
        place_type = SegmentSlotProcesses if self.kind == "process" else WorkerThreads
        size = (config.envs_per_collector, config.num_steps_per_env)
        place = place_type(factory, policy, settings, *size, queue.accounting)
        units = SegmentUnits(queue.accounting, SKIP_EPISODES)
        super().__init__(settings, config, queue, units, place)
        self.own_tunables = [self.queue_tunable(queue), self.segment_tunable(place)]
        self.start()

    def prefer(self, importance: Callable[[Segment], float]) -> None:
        """Keep the most important segments. The function is called in the fleet's thread."""

        def mean_importance(segment: Segment) -> float:
            parts = without_resting_rows([segment])
            return sum(importance(part) * part.num_steps for part in parts) / segment.num_steps

        self.importance = mean_importance


def _check(settings: CollectorSettings, config: ContinuousConfig) -> None:
    if config.num_envs % config.num_workers:
        raise UserError(
            f"--num-envs {config.num_envs} cannot be shared out evenly among {config.num_workers} collectors: "
            "make it a multiple of --num-collectors"
        )
    if settings.num_workers != config.num_workers:
        raise UserError(
            f"--mode continuous has --num-collectors ({config.num_workers}), not --num-workers: "
            "give the number of collectors there"
        )


def _choose_kind(factory: EnvFactory) -> Kind:
    speed_up = speed_up_by_threads(factory)
    if speed_up is None:
        logger.warning("collectors get a process each, for the environment failed when it was tried out in threads")
        return "process"
    kind: Kind = "thread" if speed_up >= THREADS_PAY_OFF else "process"
    logger.info("collectors get a %s each: two threads step %.1f times as fast as one", kind, speed_up)
    return kind
