"""`sequential`: one environment in this process. It is the baseline and the reference for correctness."""

from __future__ import annotations

from freerun.collecting.modes.inline_collector import InlineCollector
from freerun.collecting.workers.worker import make_rollout
from freerun.core import (
    CollectorSettings,
    Demand,
    EnvFactory,
    ModeTraits,
    Pacing,
    Policy,
    Predictor,
    ProbeModel,
    Segment,
    State,
    UserError,
    WorkerLocation,
)


class Sequential(InlineCollector):
    """One rollout over one environment, in the learner's thread."""

    traits = ModeTraits(
        description="one environment in this process: the baseline, and the reference for correctness",
        workers=WorkerLocation.THIS_PROCESS,
        pacing=Pacing.TAKES_TURNS,
        workers_flag=None,
        preference=5,
        is_reference=True,
        probe=ProbeModel(Predictor.ALTERNATING),
        bench_settings=lambda num_envs, steps_per_env: {},
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        if settings.num_workers != 1:
            raise UserError(
                f"--mode sequential has one worker, not {settings.num_workers}: "
                "leave --num-workers out, or choose --mode pipes"
            )
        super().__init__(lambda: make_rollout(factory, policy, settings.seed, num_envs=1), policy, settings)

    def collect(self, demand: Demand) -> list[Segment]:
        self._tracks.set_state(0, State.BUSY)
        segments = super().collect(demand)
        self._tracks.set_state(0, State.WAITING_FOR_WEIGHTS)
        return segments
