"""The loop: the same for every algorithm and every mode, and the only place that measures who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from freerun.core import Algorithm, Collector, Metrics, MetricSink
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.shares import Shares


@dataclass(frozen=True)
class Budget:
    """When a run is over: whichever limit comes first."""

    total_steps: int | None
    total_episodes: int | None

    def progress(self, ledger: Ledger) -> float:
        """From 0 to 1."""
        steps = ledger.steps / self.total_steps if self.total_steps else 0.0
        episodes = ledger.episodes / self.total_episodes if self.total_episodes else 0.0
        return min(1.0, max(steps, episodes))


def train(
    algorithm: Algorithm, collector: Collector, budget: Budget, ledger: Ledger, sinks: Sequence[MetricSink]
) -> None:
    """Collect what the algorithm demands, account for it, observe; when the demand is empty: update, publish."""
    shares = Shares(collector.num_workers)
    collector.publish(algorithm.policy.weights, ledger.version)
    while (progress := budget.progress(ledger)) < 1.0:
        started = time.perf_counter()
        while True:  # an empty demand takes what has arrived
            segments = collector.collect(algorithm.demand())
            ledger.account(segments)
            algorithm.observe(segments)
            if not algorithm.demand():
                break
        shares.learner_waited(time.perf_counter() - started)
        started = time.perf_counter()
        metrics = algorithm.update(ledger.version, progress)
        shares.learner_updated(time.perf_counter() - started)
        metrics |= ledger.lags()
        ledger.trained()
        collector.publish(algorithm.policy.weights, ledger.version)
        counts = collector.counts()
        ledger.check_balance(counts)
        record: Metrics = {
            "update": ledger.version,
            "episodes": ledger.episodes,
            "return_mean": ledger.mean_return,
            "length_mean": ledger.mean_length,
            "progress": budget.progress(ledger),
            **shares.rates(ledger.steps, ledger.episodes, counts.busy_seconds),
            **metrics,
            "dropped_steps": counts.steps_dropped,
            "worker_restarts": counts.worker_restarts,
        }
        for sink in sinks:
            sink.write(ledger.steps, record)
