"""`ray`: Ray actors on any number of machines; whole episodes or segments. This module can be imported without Ray."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from freerun.collecting.ray.ray_config import RayConfig
from freerun.collecting.scheduling.segment_rounds import SegmentRounds, refuse_deterministic
from freerun.collecting.scheduling.units import SHORT_UNIT_SECONDS, EpisodeUnits, SegmentUnits, short_segments_ahead
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.core import (
    CollectorSettings,
    EnvFactory,
    FollowerStart,
    HandedOver,
    ModeTraits,
    Policy,
    Predictor,
    ProbeModel,
    RequiredPackage,
    WorkerLocation,
)

if TYPE_CHECKING:
    from freerun.collecting.ray.ray_workers import RayWorkers

RAY = RequiredPackage("ray", "Ray", "ray", also=("grpc",))
logger = logging.getLogger("freerun")

MAX_UNITS_AHEAD = 64
READY_SECONDS = 60.0
"""After this time a run begins with the workers that are ready, if there are any."""


def ray_units_ahead(unit_seconds: float, num_envs: int) -> int:
    """Return how many episodes an actor holds beyond those it plays.

    Short ones are granted ahead, as many as fill two calls. Several environments take turns, so they always need some.
    """
    if num_envs == 1 and unit_seconds >= SHORT_UNIT_SECONDS:
        return 0
    # The actor finishes num_envs / unit_seconds episodes a second; 1e-6 stands for those that take no time at all.
    ahead = math.ceil(num_envs * SHORT_UNIT_SECONDS / max(unit_seconds, 1e-6))
    return min(MAX_UNITS_AHEAD, max(ahead, num_envs // 2))


class RayActors(WorkerFleet):
    """Rounds of episodes, or of segments, over Ray actors."""

    traits = ModeTraits(
        description="Ray actors on any number of machines: whole episodes or segments, run again where an actor or a "
        "node is lost",
        options=RayConfig,
        hands_over=HandedOver.EPISODES_OR_SEGMENTS,
        workers=WorkerLocation.CLUSTER,
        followers=FollowerStart.RAY_TASKS,
        package=RAY,
        why_not_auto="it is for several machines",
        preference=6,
        # A call takes 1 ms of processor time, and half of that where the next call is already waiting.
        probe=ProbeModel(
            Predictor.SCHEDULED_UNITS,
            overhead_of="pipes",
            worker_seconds_per_unit=0.0005,
            learner_seconds_per_unit=0.001,
        ),
        starts_slowly=True,
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: RayConfig):
        if config.segment_steps:
            refuse_deterministic(settings)
        RAY.require("--mode ray")
        from freerun.collecting.ray.ray_workers import RaySegmentWorkers, RayWorkers

        num_workers, num_envs = settings.num_workers, config.envs_per_worker
        self.workers: RayWorkers
        if not config.segment_steps:
            self.workers = RayWorkers(factory, policy, settings, config)
            episodes = EpisodeUnits(settings, num_envs, ray_units_ahead)
            super().__init__(settings, config, episodes.rounds, episodes, self.workers)
        else:
            unit_steps = config.segment_steps * num_envs
            segment_rounds = SegmentRounds(
                num_workers, settings.max_lag, unit_steps, start=settings.start, most_ahead=num_workers
            )
            accounting = segment_rounds.accounting
            self.workers = RaySegmentWorkers(factory, policy, settings, config, accounting)
            super().__init__(
                settings,
                config,
                segment_rounds,
                SegmentUnits(accounting, units_ahead=short_segments_ahead),
                self.workers,
            )
        self.start()

    def wait_until_ready(self) -> None:
        """A cluster may not have room for all workers at first, so the run begins with some of them."""
        num_ready = 0
        while not num_ready:
            self.wait_for_workers(READY_SECONDS)
            num_ready = self.roster.num_ready()
            if num_ready < self.num_workers:
                logger.warning("%d of %d workers have found a place so far", num_ready, self.num_workers)
