"""The training loop: the same for every algorithm and mode, and the only place that measures who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from freerun.core import Algorithm, Collector, Gauge, MetricSink, WeightExchange
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.telemetry.time_shares import TimeShares
from freerun.telemetry.update_record import make_record


def train(
    algorithm: Algorithm,
    collector: Collector,
    budget: Budget,
    ledger: Ledger,
    sinks: Sequence[MetricSink],
    gauges: Sequence[Gauge] = (),
    shares: TimeShares | None = None,
    exchange: WeightExchange | None = None,
) -> None:
    """Collect what the algorithm demands, account for it, observe it; when nothing is missing: update and publish.

    An `exchange` may replace what was learned before workers see it.
    """
    shares = shares or TimeShares(collector.num_workers)
    shares.begin(ledger, collector.counts())
    if exchange is not None:
        exchange(algorithm, ledger.steps, ledger.mean_return)
    collector.publish(algorithm.policy.weights, ledger.version)
    while (progress := budget.progress(ledger)) < 1.0:
        shares.learner_waits(algorithm.demand(), ledger)
        while True:  # at least once: an empty demand takes what has already arrived
            demand, steps_before = budget.within(algorithm.demand(), ledger), ledger.steps
            segments = collector.collect(demand)
            ledger.account(segments)
            algorithm.observe(segments)
            missing = algorithm.demand()
            if not missing or budget.steps_left(ledger) == 0:
                break
            # The budget is spent, and the data brought the algorithm no nearer to its last update.
            if ledger.steps > steps_before and not budget.allows(demand, missing, ledger):
                return
        shares.learner_works("updating")
        metrics = algorithm.update(ledger.version, progress)
        metrics |= ledger.lag_metrics()  # before the ledger counts the update: the lag is that of the data just used
        if exchange is not None:
            shares.learner_works("sharing weights")
            exchange(algorithm, ledger.steps, ledger.mean_return)
        ledger.finish_update(progress)
        # Publish first and write afterwards: workers go on with the new weights while the learner writes.
        collector.publish(algorithm.policy.weights, ledger.version)
        counts = collector.counts()
        ledger.check_balance(counts)
        shares.learner_works("evaluating the policy or writing results")
        record = make_record(metrics, budget, ledger, counts, shares, gauges)
        for sink in sinks:
            sink.write(ledger.steps, record)
