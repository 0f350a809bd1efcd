"""The key figures of a run, the range in which each should lie, and one sentence of advice if one does not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from freerun.core import Metrics

NUM_RECENT_RECORDS = 10
MUCH_WAITING_SHARE = 0.2
"""Advice is given when workers wait for more of their time than this."""
MUCH_RESTARTING_SHARE = 0.05
MUCH_LEARNER_WAITING_SHARE = 0.5
SLOW_ACTION_SECONDS, MUCH_ACTING_SHARE = 3e-4, 0.5
"""A network is too slow for a worker if it takes at least this long, and this share of a step."""


@dataclass(frozen=True)
class Figure:
    """A number that displays show, and its target range if it has one."""

    label: str
    low: float | None = None
    """The lower end of the target range."""
    high: float | None = None
    """The upper end of the target range."""
    is_percent: bool = False

    @property
    def target(self) -> str:
        """The target range in words; empty if every value is good."""
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
"""By metric, in the order in which they are shown."""


def mean_record(records: Iterable[Mapping[str, float | None]]) -> Metrics:
    """Return the mean of each metric over several records. A single update says little about who waits for whom."""
    sums: dict[str, tuple[float, int]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None:
                total, number = sums.get(name, (0.0, 0))
                sums[name] = (total + value, number + 1)
    return {name: total / number for name, (total, number) in sums.items()}


@dataclass(frozen=True)
class Situation:
    """What advice depends on besides the metrics of a run."""

    num_workers: int | None = None
    """None if it is not known."""
    more_workers: str = "more --num-workers"
    """The change of flags that gives a run of this mode more workers."""
    has_idle_gpu: bool = False
    """True if torch could use a GPU that the learner does not use."""
    work_flag: str | None = None
    """The flag that sets how much is learned from each step, such as --num-epochs; None if it is not known."""
    work: float = 0.0
    """The value of that flag. The time of an update grows in proportion to it."""
    larger_minibatch_is_faster: bool = True
    """False if larger minibatches would take the learner more time."""
    act_seconds: float = 0.0
    """How long a worker's policy takes for one action; 0 if workers choose none, or if it is not known."""

    @property
    def has_several_workers(self) -> bool:
        return self.num_workers is None or self.num_workers > 1


class RecentRecords:
    """A sink that keeps the last few records, to give advice on them."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._records: deque[Mapping[str, float]] = deque(maxlen=NUM_RECENT_RECORDS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._records.append(metrics)

    def advice(self) -> str | None:
        """Return one sentence on the last records; None if there is nothing to improve."""
        # The display's thread asks while the learner's thread writes, and a deque must not change while it is iterated.
        # Python's lock is held for the whole of this copy.
        records = tuple(self._records)
        return advise(mean_record(records), self._situation) if records else None

    def close(self) -> None:
        """This sink holds nothing open."""


def advise(metrics: Mapping[str, float], situation: Situation) -> str | None:
    """Say what slows the run down most, and what to try; None if nothing does."""
    return _about_waiting(metrics, situation) or _about_targets(metrics, situation)


def _about_waiting(metrics: Mapping[str, float], situation: Situation) -> str | None:
    def share(name: str) -> float:
        return metrics.get(f"{name}_share", 0.0)

    slot, weights = share("workers_waiting_for_slot"), share("workers_waiting_for_weights")
    others, restarting = share("workers_waiting_for_others"), share("workers_restarting")
    # The order matters: restarts cause the other waits, and a wait for others is cured by another mode alone.
    if restarting > MUCH_RESTARTING_SHARE:
        return f"workers spend {restarting:.0%} of their time restarting: see why they ended in incidents.jsonl"
    if others > MUCH_WAITING_SHARE:
        return (
            f"workers wait {others:.0%} for the slowest among them and for the learner: "
            "try --mode freerun, in which they need not"
        )
    # Both sides wait: the learner for the last episodes of its round, the other workers for new weights.
    if weights > MUCH_WAITING_SHARE and share("learner_waiting") > MUCH_WAITING_SHARE:
        return (
            f"workers wait {weights:.0%} for weights while the learner waits {share('learner_waiting'):.0%} for the "
            "last of them: try a higher --max-lag, or --segment-steps, which hands over parts of episodes"
        )
    if slot + weights > MUCH_WAITING_SHARE:
        return _about_slow_learner(metrics, situation, "slots" if slot > weights else "weights", slot + weights)
    if share("learner_waiting") > MUCH_WAITING_SHARE and (slow := _about_slow_network(metrics, situation)):
        return slow
    # A learner that waits is normal with slow environments. More workers help only if cores are idle.
    cpu_has_room = not FIGURES["cpu_percent"].is_good(metrics.get("cpu_percent", 100.0))
    if share("learner_waiting") > MUCH_LEARNER_WAITING_SHARE and cpu_has_room:
        return (
            f"the learner waits {share('learner_waiting'):.0%} for data and the CPU is "
            f"{metrics['cpu_percent']:.0f} % busy: try {situation.more_workers}"
        )
    return None


def _about_slow_learner(metrics: Mapping[str, float], situation: Situation, what: str, waiting: float) -> str:
    """Only the workers wait, so the learner is too slow for them: say by how much, and what would end it."""
    # In a second the learner works for `updating` of it, on steps that the workers collect within `busy` of it.
    busy = max(0.01, 1 - waiting)
    too_slow = max(1.0, metrics.get("learner_updating_share", 1.0) / busy)
    remedies = []
    if situation.work_flag is not None:
        less = situation.work / too_slow
        less = float(max(1, math.floor(less))) if float(situation.work).is_integer() and situation.work > 1 else less
        remedies.append(f"{situation.work_flag} {less:.2g} instead of {situation.work:g}")
    if situation.larger_minibatch_is_faster:
        remedies.append("larger minibatches")
    if situation.has_idle_gpu:
        remedies.append("--device auto, which measures whether the GPU is faster")
    if situation.num_workers is not None:
        fewer = max(1, math.ceil(busy * situation.num_workers))
        if fewer < situation.num_workers:
            workers = "1 worker" if fewer == 1 else f"{fewer} workers"
            remedies.append(f"{workers} instead of {situation.num_workers}, which would collect as much")
    late = f"workers wait {waiting:.0%} for {what}: learning takes {too_slow:.1f} × as long as collecting would"
    if not remedies:
        return late
    tried = remedies[0] if len(remedies) == 1 else f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
    return f"{late}; try {tried}"


def _about_slow_network(metrics: Mapping[str, float], situation: Situation) -> str | None:
    """Say so if workers spend most of their time on the network and not on their environments."""
    busy, rate = metrics.get("workers_busy_share", 0.0), metrics.get("steps_per_second", 0.0)
    if situation.act_seconds < SLOW_ACTION_SECONDS or not (busy and rate and situation.num_workers):
        return None
    # Workers are busy for `busy * num_workers` seconds of a second, in which they make `rate` steps.
    step_seconds = busy * situation.num_workers / rate
    if situation.act_seconds < MUCH_ACTING_SHARE * step_seconds:
        return None
    return (
        f"the network takes {situation.act_seconds * 1e3:.1f} ms of the {step_seconds * 1e3:.1f} ms of a worker's "
        "step: try a smaller --network, or with a GPU --mode sync --act-on-device, which chooses all actions at once"
    )


def _about_targets(metrics: Mapping[str, float], situation: Situation) -> str | None:
    fewer = "fewer collectors, or " if situation.has_several_workers else ""
    remedies = {
        "queue_percent": (
            f"collectors bring less than the learner takes; try {situation.more_workers}",
            f"the learner takes less than collectors bring; try {fewer}less work per update",
        ),
        "gpu_percent": ("it waits for data or for Python; try larger batches, or more environments", ""),
        "cpu_percent": (f"cores are idle; try {situation.more_workers}", ""),
        # A replay buffer fills up by itself, and a full one needs no remedy.
        "buffer_percent": ("", ""),
    }
    for name, (too_low, too_high) in remedies.items():
        # The first figure outside its range decides: one piece of advice at a time can be followed.
        value, figure = metrics.get(name), FIGURES[name]
        if value is None or figure.is_good(value):
            continue
        remedy = too_low if value < (figure.low or 0) else too_high
        if remedy:
            return f"{figure.label} {value:.0f} % (target {figure.target}): {remedy}"
    return None
