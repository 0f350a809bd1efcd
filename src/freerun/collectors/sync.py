"""`sync`: a process per environment behind Gymnasium's AsyncVectorEnv. Every step waits for the slowest."""

from __future__ import annotations

from freerun.collectors.inline import Inline
from freerun.core import CollectorSettings, EnvFactory, Policy


class Sync(Inline):
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        super().__init__(factory.make_parallel(settings.num_workers), policy, settings)
