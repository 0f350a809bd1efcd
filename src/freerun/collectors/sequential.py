"""`sequential`: one environment in this process. The baseline, and the reference for correctness."""

from __future__ import annotations

from freerun.collectors.inline import Inline
from freerun.collectors.worker import make_rollout
from freerun.core import CollectorSettings, Demand, EnvFactory, Policy, Segment, State, UserError


class Sequential(Inline):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        if settings.num_workers != 1:
            raise UserError(
                f"--mode sequential has one worker, not {settings.num_workers}: "
                "leave --num-workers out, or choose --mode pipes"
            )
        super().__init__(lambda: make_rollout(factory, policy, settings.seed, num_envs=1), policy, settings)

    def collect(self, demand: Demand) -> list[Segment]:
        self._tracks.enter(0, State.BUSY)
        segments = super().collect(demand)
        self._tracks.enter(0, State.WAITING_FOR_WEIGHTS)
        return segments
