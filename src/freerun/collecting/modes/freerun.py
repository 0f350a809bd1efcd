"""`freerun`: persistent workers write segments into shared memory; only slot numbers travel through pipes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from freerun.collecting.scheduling.segment_rounds import SegmentRounds, refuse_deterministic
from freerun.collecting.scheduling.units import EpisodeUnits, SegmentUnits, short_segments_ahead
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.slot_workers import SegmentSlotProcesses, SlotProcesses
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
    Tunable,
    UserError,
    require_positive,
)


@dataclass(frozen=True)
class FreerunConfig(ModeOptions):
    """Mode `freerun`: how its workers collect."""

    envs_per_worker: Common[int] = 1
    """Environments that a worker steps in turn, with one call of the policy for all: for environments that are fast."""
    segment_steps: int | None = None
    """Hand over this many steps of all of a worker's environments at a time; 0 hands over whole episodes (if not given:
    whole episodes of up to 4 environments at once, and segments of more where that keeps them busy)."""
    pin_workers: bool = False
    """Keep each worker on one core."""

    def __post_init__(self) -> None:
        require_positive(self, "envs_per_worker")
        if self.segment_steps is not None and self.segment_steps < 0:
            raise UserError(f"--segment-steps must be 0 or more, not {self.segment_steps}")

    def check(self, demand: Demand) -> None:
        """Raise if an algorithm that demands this cannot be served."""
        if demand.episodes and self.segment_steps:
            raise UserError("--episodes-per-update needs whole episodes: leave --segment-steps out")


class Freerun(WorkerFleet):
    """Rounds of episodes, or of segments, over processes with shared memory."""

    traits = ModeTraits(
        description="persistent workers that write into shared memory and wait for nobody: the fastest on one machine",
        options=FreerunConfig,
        hands_over=HandedOver.EPISODES_OR_SEGMENTS,
        resizable=frozenset({"num_workers", "envs_per_worker"}),
        preference=0,
        probe=ProbeModel(Predictor.SCHEDULED_UNITS),
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: FreerunConfig):
        if config.pin_workers and not hasattr(os, "sched_setaffinity"):
            raise UserError("--pin-workers needs Linux: this system cannot keep a process on one core; leave it out")
        if not config.segment_steps:
            self._compose_episodes(factory, policy, settings, config)
        else:
            self._compose_segments(factory, policy, settings, config, config.segment_steps)
        self.start()

    def _compose_episodes(
        self, factory: EnvFactory, policy: Policy, settings: CollectorSettings, config: FreerunConfig
    ) -> None:
        num_envs = max_envs = config.envs_per_worker
        if settings.tuning_bounds is not None:
            max_envs = max(num_envs, settings.tuning_bounds.max_envs_per_worker)
        units = EpisodeUnits(settings, num_envs)
        place = SlotProcesses.for_episodes(factory, policy, settings, num_envs, max_envs, config.pin_workers)
        super().__init__(settings, config, units.rounds, units, place)

        def set_envs_per_worker(value: float) -> None:
            """Workers with another number of environments replace those that have nothing left to do."""
            with self.changed:
                units.envs_per_worker = place.envs_per_worker = int(value)
            self.wake()

        if max_envs > 1:
            read, is_settled = lambda: units.envs_per_worker, self.roster.is_complete
            envs = Tunable("envs_per_worker", read, set_envs_per_worker, 1.0, max_envs, is_settled=is_settled)
            self.own_tunables = [envs]

    def _compose_segments(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        config: FreerunConfig,
        segment_steps: int,
    ) -> None:
        refuse_deterministic(settings)
        num_envs = config.envs_per_worker
        rounds = SegmentRounds(
            settings.max_workers,
            settings.max_lag,
            segment_steps * num_envs,
            start=settings.start,
            num_playing=settings.num_workers,
            # One segment of each worker is enough to keep all of them busy while the learner updates. What starts
            # earlier than necessary only gets older.
            most_ahead=settings.max_workers,
        )
        accounting = rounds.accounting
        place = SegmentSlotProcesses(factory, policy, settings, num_envs, segment_steps, accounting, config.pin_workers)
        super().__init__(settings, config, rounds, SegmentUnits(accounting, units_ahead=short_segments_ahead), place)
        self.own_tunables = [self.segment_tunable(place, lambda steps: rounds.set_unit_steps(steps * num_envs))]
