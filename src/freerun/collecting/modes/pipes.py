"""`pipes`: persistent worker processes with a pipe each; they send whole episodes as each finishes."""

from __future__ import annotations

from freerun.collecting.scheduling.units import EpisodeUnits
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.process_workers import PipeProcesses
from freerun.collecting.workers.worker import WorkerSetup
from freerun.core import CollectorSettings, EnvFactory, ModeOptions, ModeTraits, Policy, Predictor, ProbeModel


class Pipes(WorkerFleet):
    """Rounds of episodes over processes with a pipe."""

    traits = ModeTraits(
        description="persistent workers, a pipe each: whole episodes, handed over as each finishes",
        resizable=frozenset({"num_workers"}),
        preference=1,
        probe=ProbeModel(Predictor.SCHEDULED_UNITS),
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        place = PipeProcesses(WorkerSetup.pack(factory, policy, settings))
        units = EpisodeUnits(settings)
        super().__init__(settings, ModeOptions(), units.rounds, units, place)
        self.start()
