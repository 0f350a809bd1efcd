"""Collecting in the learner's own process: they take turns, so no step is ever older than the newest weights."""

from __future__ import annotations

import math

from freerun.collectors.rollout import Rollout
from freerun.collectors.rounds import Rounds
from freerun.core import CollectorSettings, Counts, Demand, FloatArray, Policy, Segment, UserError, VectorEnv


class Inline:
    """One rollout over one vector environment, driven by `collect`."""

    def __init__(self, env: VectorEnv, policy: Policy, settings: CollectorSettings):
        if settings.max_lag:
            raise UserError(
                "this mode collects and learns in turns, so --max-lag must be 0: "
                "choose --mode pipes or --mode executor to collect while the learner updates"
            )
        self.num_workers = settings.num_workers
        self._rounds = Rounds(max_lag=0)
        self._rollout = Rollout(env, policy, settings.seed)
        self._num_envs = env.num_envs
        self._next_episode = 0
        self._newest_handed_over = -1

    def counts(self) -> Counts:
        counts = self._rounds.counts()
        # Of episodes handed over in parts, those count whose first step the ledger has seen.
        counts.episodes_started += self._newest_handed_over + 1
        return counts

    def publish(self, weights: FloatArray, version: int) -> None:
        self._rollout.load(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if demand.steps and not demand.whole_episodes:
            return [self._collect_steps(math.ceil(demand.steps / self._num_envs))]
        self._rounds.open(demand)
        for segment in self._rollout.episodes(lambda wait: self._rounds.next()):
            self._rounds.finish(int(segment.episode[0, 0]), segment.copy())
        segments = self._rounds.take()
        assert segments is not None
        return segments

    def _collect_steps(self, steps_per_env: int) -> Segment:
        segment = next(self._rollout.segments(steps_per_env, self._number)).copy()
        self._newest_handed_over = int(segment.episode.max())
        self._rounds.book.steps_delivered += segment.num_steps
        self._rounds.book.busy_seconds += segment.seconds
        return segment

    def _number(self, wait: bool) -> int:
        self._next_episode += 1
        return self._next_episode - 1

    def renew(self, series: int) -> None:
        self._rounds.renew(series)

    def close(self) -> None:
        self._rollout.close()
