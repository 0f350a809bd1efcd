"""Collecting in the learner's own process: they take turns, so no step is ever older than the newest weights."""

from __future__ import annotations

from freerun.collectors.rollout import Rollout
from freerun.collectors.rounds import Rounds
from freerun.core import CollectorSettings, Counts, Demand, FloatArray, Policy, Segment, UserError, VectorEnv


class Inline:
    """One rollout over one vector environment, driven by `collect`."""

    def __init__(self, env: VectorEnv, policy: Policy, settings: CollectorSettings):
        if settings.max_lag > 0:
            raise UserError(
                "this mode collects and learns in turns, so --max-lag must be 0: "
                "choose --mode pipes or --mode executor to collect while the learner updates"
            )
        self.num_workers = settings.num_workers
        self._rounds = Rounds(max_lag=0)
        self._rollout = Rollout(env, policy, settings.seed)

    def counts(self) -> Counts:
        return self._rounds.counts()

    def publish(self, weights: FloatArray, version: int) -> None:
        self._rollout.load(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        self._rounds.open(demand)
        for segment in self._rollout.episodes(lambda wait: self._rounds.next()):
            self._rounds.finish(int(segment.episode[0, 0]), segment.copy())
        segments = self._rounds.take()
        assert segments is not None
        return segments

    def close(self) -> None:
        self._rollout.close()
