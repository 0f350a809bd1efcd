"""The key figures of a run, what each should be, and one sentence of advice where one is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from freerun.core import Metrics

RECENT_RECORDS = 10


@dataclass(frozen=True)
class Figure:
    label: str
    low: float | None = None
    """Where it should lie, from here …"""
    high: float | None = None
    """… to here."""
    is_percent: bool = False

    @property
    def target(self) -> str:
        """In words: empty where anything will do."""
        if self.low is None or self.high is None:
            return ""
        return f"above {self.low:.0f} %" if self.high >= 100 else f"{self.low:.0f}–{self.high:.0f} %"

    def is_good(self, value: float) -> bool:
        return self.low is None or self.high is None or self.low <= value <= self.high


FIGURES = {
    "steps_per_second": Figure("steps/s"),
    "updates_per_second": Figure("updates/s"),
    "episodes_per_second": Figure("episodes/s"),
    "return_mean": Figure("return"),
    "length_mean": Figure("length"),
    "lag_mean": Figure("lag"),
    "dropped_steps": Figure("dropped"),
    "worker_restarts": Figure("restarts"),
    "queue_percent": Figure("queue", 50, 80, is_percent=True),
    "buffer_percent": Figure("buffer", 70, 90, is_percent=True),
    "gpu_percent": Figure("GPU", 90, 100, is_percent=True),
    "cpu_percent": Figure("CPU", 80, 100, is_percent=True),
}
"""In the order in which they are shown."""


def mean_record(records: Iterable[Mapping[str, float | None]]) -> Metrics:
    """What records have in common on average; one update says little about who waits for whom."""
    sums: dict[str, tuple[float, int]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None:
                total, number = sums.get(name, (0.0, 0))
                sums[name] = (total + value, number + 1)
    return {name: total / number for name, (total, number) in sums.items()}


class RecentRecords:
    """The last few, to advise on."""

    def __init__(self) -> None:
        self._records: deque[Mapping[str, float]] = deque(maxlen=RECENT_RECORDS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._records.append(metrics)

    def advice(self) -> str | None:
        return advise(mean_record(self._records)) if self._records else None

    def close(self) -> None:
        """Nothing is held."""


def advise(metrics: Mapping[str, float]) -> str | None:
    """What holds the run up most, and what to try; None where nothing does."""
    return _about_waiting(metrics) or _about_targets(metrics)


def _about_waiting(metrics: Mapping[str, float]) -> str | None:
    def share(name: str) -> float:
        return metrics.get(f"{name}_share", 0.0)

    slot, weights = share("workers_waiting_for_slot"), share("workers_waiting_for_weights")
    others, restarting = share("workers_waiting_for_others"), share("workers_restarting")
    if restarting > 0.05:
        return f"workers spend {restarting:.0%} of their time restarting: see why they ended in incidents.jsonl"
    if others > 0.2:
        return (
            f"workers wait {others:.0%} for the slowest among them and for the learner: "
            "try --mode freerun, in which they need not"
        )
    if weights > 0.2 and share("learner_waiting") > 0.2:
        return (
            f"workers wait {weights:.0%} for weights while the learner waits {share('learner_waiting'):.0%} for the "
            "last of them: try a higher --max-lag, or --segment-steps, which hands over parts of episodes"
        )
    if slot + weights > 0.2:
        what = "slots" if slot > weights else "weights"
        return (
            f"workers wait {slot + weights:.0%} for {what}: the learner is the bottleneck; try --device cuda, larger "
            "minibatches, fewer epochs or updates per step, or fewer workers"
        )
    if share("learner_waiting") > 0.5 and not FIGURES["cpu_percent"].is_good(metrics.get("cpu_percent", 100.0)):
        return (
            f"the learner waits {share('learner_waiting'):.0%} for data and the CPU is "
            f"{metrics['cpu_percent']:.0f} % busy: try more --num-workers"
        )
    return None


def _about_targets(metrics: Mapping[str, float]) -> str | None:
    remedies = {
        "queue_percent": (
            "collectors bring less than the learner takes; try more of them",
            "the learner takes less than collectors bring; try fewer collectors, or less work per update",
        ),
        "gpu_percent": ("it waits for data or for Python; try larger batches, or more environments", ""),
        "cpu_percent": ("cores are idle; try more --num-workers", ""),
        # A buffer fills up by itself, and nothing need be done about one that is full.
        "buffer_percent": ("", ""),
    }
    for name, (too_low, too_high) in remedies.items():
        value, figure = metrics.get(name), FIGURES[name]
        if value is None or figure.is_good(value):
            continue
        remedy = too_low if value < (figure.low or 0) else too_high
        if remedy:
            return f"{figure.label} {value:.0f} % (target {figure.target}): {remedy}"
    return None
