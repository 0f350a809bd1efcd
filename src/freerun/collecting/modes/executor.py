"""`executor`: a ProcessPoolExecutor whose processes keep environments warm; whole episodes as each finishes."""

from __future__ import annotations

from freerun.collecting.scheduling.units import EpisodeUnits
from freerun.collecting.workers.fleet import WorkerFleet
from freerun.collecting.workers.pool_workers import PoolProcesses
from freerun.collecting.workers.worker import WorkerSetup
from freerun.core import CollectorSettings, EnvFactory, ModeOptions, ModeTraits, Policy, Predictor, ProbeModel


class Executor(WorkerFleet):
    """Rounds of episodes over the tasks of a process pool."""

    traits = ModeTraits(
        description="a ProcessPoolExecutor kept warm: whole episodes, handed over as each finishes",
        resizable=frozenset({"num_workers"}),
        preference=2,
        probe=ProbeModel(Predictor.SCHEDULED_UNITS),
    )

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        place = PoolProcesses(WorkerSetup.pack(factory, policy, settings), settings.num_workers)
        units = EpisodeUnits(settings)
        super().__init__(settings, ModeOptions(), units.rounds, units, place)
        self.start()
