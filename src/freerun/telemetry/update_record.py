"""The record of an update: what it holds, and how it is written to metrics.jsonl. Displays and trackers show it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from freerun.core import Counts, Gauge, Metrics
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger, LineWriter
from freerun.telemetry.time_shares import TimeShares


def make_record(
    metrics: Metrics, budget: Budget, ledger: Ledger, counts: Counts, shares: TimeShares, gauges: Iterable[Gauge]
) -> Metrics:
    """Put the metrics of the algorithm together with everything that was counted and measured around it.

    Gauges are read here. One of them may evaluate the policy, so this can take a while.
    """
    record: Metrics = {
        "update": ledger.version,
        "episodes": ledger.episodes,
        "return_mean": ledger.mean_return,
        "length_mean": ledger.mean_length,
        "progress": budget.progress(ledger),
        **shares.rates(ledger.steps, ledger.episodes, ledger.version, counts.busy_seconds),
        **metrics,
    }
    for gauge in gauges:
        record |= gauge.read(ledger.steps)
    record["dropped_steps"] = counts.steps_dropped
    if counts.queue_fill is not None:
        record["queue_percent"] = 100 * counts.queue_fill
    record["worker_restarts"] = counts.worker_restarts
    return record


class MetricsFile:
    """A sink that writes each record as a line of JSON into metrics.jsonl."""

    def __init__(self, file: LineWriter):
        self._file = file

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinity, so such a value becomes null.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """The caller closes the file, which checkpoints use too."""
