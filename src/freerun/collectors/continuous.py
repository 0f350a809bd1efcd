"""`continuous` (v1): collectors that never wait, each with its own environments; a bounded queue drops the oldest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from freerun.collectors.freerun import Freerun, FreerunConfig
from freerun.collectors.segments import refuse_episodes
from freerun.collectors.stream import Stream
from freerun.collectors.threads import Threads, speed_up_by_threads
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    Dial,
    EnvFactory,
    FloatArray,
    ModeOptions,
    Policy,
    Segment,
    UserError,
    require_positive,
)

logger = logging.getLogger("freerun")

Kind = Literal["thread", "process"]
DEFAULT_NUM_COLLECTORS = 4
THREADS_PAY_OFF = 1.8
"""Two threads must step two environments this many times as fast as one: 2 where steps leave Python's lock alone. At
1.5 (MuJoCo) collectors in threads got in each other's way, and in the learner's."""


@dataclass(frozen=True)
class ContinuousConfig(ModeOptions):
    """Mode `continuous`: how its collectors collect, and what the queue holds."""

    num_collectors: int | None = None
    """Collectors, each with its share of the environments (4 if not given; 1 for environments that are tensors)."""
    num_envs: int = 64
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
        return -(-self.collection_batch_size // self.envs_per_collector)

    @property
    def unit_steps(self) -> int:
        return self.num_steps_per_env * self.envs_per_collector

    def check(self, demand: Demand) -> None:
        """Whether an algorithm that demands this can be served."""
        refuse_episodes(demand, "continuous")


class Continuous:
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: ContinuousConfig):
        _check(settings, config)
        self._config = config
        prefers_rare_lengths = config.queue_priority == "rare-lengths"
        self._stream = Stream(
            settings.most_workers, config.max_queue_size, prefers_rare_lengths, settings.start, config.num_workers
        )
        self.kind: Kind = _choose_kind(factory) if config.collector_kind == "auto" else config.collector_kind
        self._crew: Freerun | Threads
        if self.kind == "process":
            task = FreerunConfig(config.envs_per_collector, config.num_steps_per_env)
            self._crew = Freerun(factory, policy, settings, task, self._stream, tolerant=True)
        else:
            size = (config.envs_per_collector, config.num_steps_per_env)
            self._crew = Threads(factory, policy, settings, *size, self._stream)
        self.counts: Callable[[], Counts] = self._crew.counts
        self.publish: Callable[[FloatArray, int], None] = self._crew.publish
        self.close: Callable[[], None] = self._crew.close
        self.dials: Callable[[], list[Dial]] = self._crew.dials

    @property
    def num_workers(self) -> int:
        return self._crew.num_workers

    def collect(self, demand: Demand) -> list[Segment]:
        self._config.check(demand)
        return self._crew.collect(demand)

    def prefer(self, importance: Callable[[Segment], float]) -> None:
        """Keep the segments that this says most of; it is called in the threads that receive them."""
        self._crew.weigh = lambda segment: self._stream.announce(segment, importance(segment))


def _check(settings: CollectorSettings, config: ContinuousConfig) -> None:
    if config.num_envs % config.num_workers:
        raise UserError(
            f"--num-envs {config.num_envs} cannot be shared out evenly among {config.num_workers} collectors: "
            "make it a multiple of --num-collectors"
        )
    if settings.deterministic:
        raise UserError(
            "--mode continuous cannot be --deterministic, for what it collects depends on the clock: "
            "choose --mode freerun (or any other that hands over whole episodes)"
        )
    if settings.num_workers != config.num_workers:
        raise UserError(
            f"--mode continuous has --num-collectors ({config.num_workers}), not --num-workers: "
            "give the number of collectors there"
        )
    if settings.max_lag is not None:
        raise UserError(
            "--mode continuous never waits, so it cannot keep to a --max-lag: "
            "leave it out, or choose --mode batch or freerun, which honour it"
        )


def _choose_kind(factory: EnvFactory) -> Kind:
    speed_up = speed_up_by_threads(factory)
    if speed_up is None:
        logger.warning("collectors get a process each, for the environment failed when it was tried out in threads")
        return "process"
    kind: Kind = "thread" if speed_up >= THREADS_PAY_OFF else "process"
    logger.info("collectors get a %s each: two threads step %.1f times as fast as one", kind, speed_up)
    return kind
