"""Which setting to change in which direction, given what was observed. The worst bottleneck comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from freerun.tuning.observation import Observation

QUEUE_BAND = (0.50, 0.80)
"""How full a queue should be."""
MIN_BUFFER_FILL = 0.70
"""Below this, a replay buffer lacks data: learning less per step is not tried."""
WAITS = 0.10
"""A share of waiting that is worth a try."""
WAITS_MUCH = 0.30
WAITS_MOST = 0.80
CPU_FULL = 0.90
CPU_IDLE = 0.25
LONGER_QUEUE = 16
"""Room in a queue costs little, and a smaller factor would gain less than the noise of a busy machine."""
WORKERS, ENVS, QUEUE, BATCH = "num_workers", "envs_per_worker", "queue_size", "collection_batch"
MINIBATCH, RATIO = "minibatch", "update_ratio"


class Aim(Enum):
    """What a change is for, and thus what it is judged by."""

    SPEED = "speed"
    """More steps per second, by more than noise."""
    LESS = "less"
    """The same speed with fewer processes or less memory."""
    QUEUE = "queue"
    """The same speed, and the queue nearer to its band."""
    LAG = "lag"
    """The same speed, and fresher data."""


@dataclass(frozen=True)
class Suggestion:
    """A change that is worth a try."""

    name: str
    """The name of the tunable."""
    factor: float
    """What to multiply its value by."""
    aim: Aim
    reason: str


@dataclass(frozen=True)
class Circumstances:
    """What does not change while a run goes on."""

    num_cores: int
    lag_budget: float | None = None
    """How old data may be on average, in updates. None where the mode itself limits the lag."""


def distance_to_band(fill: float, band: tuple[float, float]) -> float:
    """How far a fill lies outside a band; 0 within it."""
    return max(band[0] - fill, fill - band[1], 0.0)


def suggestions(seen: Observation, values: Mapping[str, float], circumstances: Circumstances) -> Iterator[Suggestion]:
    """Changes that are worth a try, the most promising first. `values` are those of the tunables, by name."""
    if seen.learner_waiting >= WAITS:
        yield from _speed_up_collecting(seen, values, circumstances)
    if seen.learner_waiting < WAITS_MUCH:
        yield from _speed_up_learning(seen, values, circumstances)
    yield from _adjust_queue(seen, values, circumstances)


def _speed_up_collecting(
    seen: Observation, values: Mapping[str, float], circumstances: Circumstances
) -> Iterator[Suggestion]:
    waits = f"the learner waits {seen.learner_waiting:.0%} for data"
    idle = seen.workers_waiting_for_weights + seen.workers_waiting_for_slot
    if QUEUE in values and max(idle, seen.dropped) >= WAITS:
        what = f"{seen.dropped:.0%} of the steps are dropped" if seen.dropped >= WAITS else "workers wait for room"
        yield Suggestion(QUEUE, LONGER_QUEUE, Aim.SPEED, f"{waits} while {what}")
    if WORKERS in values and idle < WAITS_MUCH and seen.cpu < CPU_FULL:
        why = f"{waits}, workers are busy and the cores are not ({seen.cpu:.0%})"
        is_nearly_idle = seen.cpu < CPU_IDLE and seen.learner_waiting > WAITS_MOST
        yield Suggestion(WORKERS, 4 if is_nearly_idle else 2, Aim.SPEED, why)
    if seen.cpu >= CPU_FULL:
        full = f"{waits} and all cores are busy"
        if values.get(WORKERS, 0) > circumstances.num_cores:
            yield Suggestion(WORKERS, 0.5, Aim.LESS, f"{full}: fewer workers share them as well")
        if ENVS in values:
            yield Suggestion(ENVS, 2, Aim.SPEED, f"{full}: a policy asked for several at once costs less")
        if BATCH in values:
            yield Suggestion(BATCH, 2, Aim.SPEED, f"{full}: larger batches are handed over less often")
    if WORKERS in values and idle >= WAITS_MUCH:
        why = f"{waits}, and workers wait {idle:.0%} of their time: there are more of them than may run"
        if BATCH in values:
            yield Suggestion(BATCH, 0.5, Aim.SPEED, f"{why}; smaller batches arrive earlier")
        yield Suggestion(WORKERS, _share_of_workers_needed(seen), Aim.LESS, why)


def _speed_up_learning(
    seen: Observation, values: Mapping[str, float], circumstances: Circumstances
) -> Iterator[Suggestion]:
    waits_little = f"the learner waits only {seen.learner_waiting:.0%} for data"
    idle = seen.workers_waiting_for_weights + seen.workers_waiting_for_slot
    if WORKERS in values and idle >= WAITS_MUCH:
        why = f"{waits_little} and workers wait {idle:.0%} of their time: fewer leave it more of the cores"
        yield Suggestion(WORKERS, _share_of_workers_needed(seen), Aim.LESS, why)
    elif seen.cpu >= CPU_FULL and values.get(WORKERS, 0) > circumstances.num_cores:
        why = f"{waits_little} and all cores are busy: fewer workers leave it more of them"
        yield Suggestion(WORKERS, 0.5, Aim.LESS, why)
    if seen.learner_waiting >= WAITS:
        return
    if MINIBATCH in values:
        yield Suggestion(MINIBATCH, 2, Aim.SPEED, f"{waits_little}: larger minibatches are fewer")
    if RATIO in values and (seen.buffer_fill is None or seen.buffer_fill >= MIN_BUFFER_FILL):
        yield Suggestion(RATIO, 0.75, Aim.SPEED, f"{waits_little}: less learning per step takes less time")


def _adjust_queue(seen: Observation, values: Mapping[str, float], circumstances: Circumstances) -> Iterator[Suggestion]:
    if QUEUE not in values or seen.queue_fill is None:
        return
    low, high = QUEUE_BAND
    if circumstances.lag_budget is not None and seen.lag > circumstances.lag_budget:
        why = f"data is {seen.lag:.1f} updates old on average (budget {circumstances.lag_budget:g})"
        yield Suggestion(QUEUE, 0.5, Aim.LAG, f"{why}: a shorter queue holds less of it")
    if seen.learner_waiting >= WAITS:
        return
    why = f"the queue is {seen.queue_fill:.0%} full (target {low:.0%} to {high:.0%})"
    if seen.queue_fill > high:
        if WORKERS in values:
            yield Suggestion(WORKERS, 0.5, Aim.LESS, f"{why}: fewer workers bring as much as is taken")
        yield Suggestion(QUEUE, 0.5, Aim.LAG, f"{why}: a shorter one holds fresher data")
    elif seen.queue_fill < low:
        yield Suggestion(QUEUE, 0.5, Aim.QUEUE, f"{why}: less room will do")


def _share_of_workers_needed(seen: Observation) -> float:
    """The share that was busy, and a quarter more; between a quarter and a half of them."""
    return min(0.5, max(0.25, 1.25 * seen.workers_busy))
