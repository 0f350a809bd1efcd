"""The loop: the same for every algorithm and every mode, and the only place that measures who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from freerun.core import Algorithm, Collector, Gauge, Metrics, MetricSink, State
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.shares import Shares


def train(
    algorithm: Algorithm,
    collector: Collector,
    budget: Budget,
    ledger: Ledger,
    sinks: Sequence[MetricSink],
    gauges: Sequence[Gauge] = (),
    shares: Shares | None = None,
) -> None:
    """Collect what the algorithm demands, account for it, observe; when the demand is empty: update, publish."""
    shares = shares or Shares(collector.num_workers)
    shares.begin(ledger, collector.counts())
    collector.publish(algorithm.policy.weights, ledger.version)
    while (progress := budget.progress(ledger)) < 1.0:
        shares.learner_enters(State.WAITING_FOR_DATA)
        while True:  # an empty demand takes what has arrived
            segments = collector.collect(algorithm.demand())
            ledger.account(segments)
            algorithm.observe(segments)
            if not algorithm.demand():
                break
        shares.learner_enters(State.BUSY)
        metrics = algorithm.update(ledger.version, progress)
        metrics |= ledger.lags()
        ledger.trained(progress)
        collector.publish(algorithm.policy.weights, ledger.version)
        counts = collector.counts()
        ledger.check_balance(counts)
        record: Metrics = {
            "update": ledger.version,
            "episodes": ledger.episodes,
            "return_mean": ledger.mean_return,
            "length_mean": ledger.mean_length,
            "progress": budget.progress(ledger),
            **shares.rates(ledger.steps, ledger.episodes, ledger.version, counts.busy_seconds),
            **metrics,
            **{name: value for gauge in gauges for name, value in gauge.read(ledger.steps).items()},
            "dropped_steps": counts.steps_dropped,
            **({} if counts.queue_fill is None else {"queue_percent": 100 * counts.queue_fill}),
            "worker_restarts": counts.worker_restarts,
        }
        for sink in sinks:
            sink.write(ledger.steps, record)
