"""Which knob to move which way, as what was seen suggests: what holds the run up most comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from freerun.adapting.knobs import Knob
from freerun.adapting.observation import Observation

QUEUE_BAND = (0.50, 0.80)
BUFFER_BAND = (0.70, 0.90)
WAITS = 0.10
"""A share of waiting from which on something is worth a try."""
WAITS_MUCH = 0.30
CPU_FULL = 0.90
CPU_IDLE = 0.50
MUCH_LONGER = 16
"""Room costs little, and a queue that is still too short gains less than the noise of a busy machine."""
WORKERS, ENVS, QUEUE, BATCH = "num_workers", "envs_per_worker", "queue_size", "collection_batch"
MINIBATCH, RATIO = "minibatch", "update_ratio"


class Aim(Enum):
    """What a move is for, and thus what it is judged by."""

    SPEED = "speed"
    """More steps per second, by more than noise."""
    LESS = "less"
    """The same speed with less: fewer processes, less room."""
    QUEUE = "queue"
    """The same speed, and the queue nearer to its band."""
    LAG = "lag"
    """The same speed, and data that is less old."""


@dataclass(frozen=True)
class Suggestion:
    knob: str
    target: float
    aim: Aim
    reason: str


@dataclass(frozen=True)
class Circumstances:
    """What does not change while a run goes on."""

    num_cores: int
    lag_budget: float | None = None
    """How old data may be on average, where nothing else sees to it."""


def off_band(fill: float, band: tuple[float, float]) -> float:
    """How far outside it is."""
    return max(band[0] - fill, fill - band[1], 0.0)


def suggestions(seen: Observation, knobs: Mapping[str, Knob], given: Circumstances) -> Iterator[Suggestion]:
    """Moves worth trying, best first. Those that the bounds leave no room for are left out."""
    for suggestion in _all(seen, knobs, given):
        if suggestion.target != knobs[suggestion.knob].value:
            yield suggestion


def _all(seen: Observation, knobs: Mapping[str, Knob], given: Circumstances) -> Iterator[Suggestion]:
    if seen.learner_waiting >= WAITS:
        yield from _collecting_is_slow(seen, knobs, given)
    if seen.learner_waiting < WAITS_MUCH:
        yield from _learning_is_slow(seen, knobs, given)
    yield from _bands(seen, knobs, given)


def _collecting_is_slow(seen: Observation, knobs: Mapping[str, Knob], given: Circumstances) -> Iterator[Suggestion]:
    waits = f"the learner waits {seen.learner_waiting:.0%} for data"
    queue, workers, envs, batch = (knobs.get(name) for name in (QUEUE, WORKERS, ENVS, BATCH))
    idle = seen.workers_waiting_for_weights + seen.workers_waiting_for_slot
    if queue and max(idle, seen.dropped) >= WAITS:
        what = f"{seen.dropped:.0%} of the steps are dropped" if seen.dropped >= WAITS else "workers wait for room"
        yield Suggestion(QUEUE, queue.times(MUCH_LONGER), Aim.SPEED, f"{waits} while {what}")
    if idle < WAITS_MUCH and seen.cpu < CPU_FULL:
        why = f"{waits}, workers are busy and the cores are not ({seen.cpu:.0%})"
        if workers:
            bold = seen.cpu < CPU_IDLE / 2 and seen.learner_waiting > 0.8
            yield Suggestion(WORKERS, workers.times(4 if bold else 2), Aim.SPEED, why)
    if seen.cpu >= CPU_FULL:
        full = f"{waits} and all cores are busy"
        if workers and workers.value > given.num_cores:
            yield Suggestion(WORKERS, workers.times(0.5), Aim.LESS, f"{full}: fewer workers share them as well")
        if envs:
            yield Suggestion(ENVS, envs.times(2), Aim.SPEED, f"{full}: a policy asked for several at once costs less")
        if batch:
            yield Suggestion(BATCH, batch.times(2), Aim.SPEED, f"{full}: larger batches are handed over less often")
    if workers and idle >= WAITS_MUCH:
        why = f"{waits}, and workers wait {idle:.0%} of their time: there are more of them than may run"
        if batch:
            yield Suggestion(BATCH, batch.times(0.5), Aim.SPEED, f"{why}; smaller batches arrive earlier")
        yield Suggestion(WORKERS, _needed(workers, seen), Aim.LESS, why)


def _learning_is_slow(seen: Observation, knobs: Mapping[str, Knob], given: Circumstances) -> Iterator[Suggestion]:
    limits = f"the learner waits only {seen.learner_waiting:.0%} for data"
    workers, minibatch, ratio = (knobs.get(name) for name in (WORKERS, MINIBATCH, RATIO))
    idle = seen.workers_waiting_for_weights + seen.workers_waiting_for_slot
    if workers and idle >= WAITS_MUCH:
        why = f"{limits} and workers wait {idle:.0%} of their time: fewer leave it more of the cores"
        yield Suggestion(WORKERS, _needed(workers, seen), Aim.LESS, why)
    elif workers and seen.cpu >= CPU_FULL and workers.value > given.num_cores:
        why = f"{limits} and all cores are busy: fewer workers leave it more of them"
        yield Suggestion(WORKERS, workers.times(0.5), Aim.LESS, why)
    if seen.learner_waiting >= WAITS:
        return
    if minibatch:
        yield Suggestion(MINIBATCH, minibatch.times(2), Aim.SPEED, f"{limits}: larger minibatches are fewer")
    if ratio and (seen.buffer_fill is None or seen.buffer_fill >= BUFFER_BAND[0]):
        yield Suggestion(RATIO, ratio.times(0.75), Aim.SPEED, f"{limits}: less learning per step takes less time")


def _bands(seen: Observation, knobs: Mapping[str, Knob], given: Circumstances) -> Iterator[Suggestion]:
    queue, workers = knobs.get(QUEUE), knobs.get(WORKERS)
    if queue is None or seen.queue_fill is None:
        return
    low, high = QUEUE_BAND
    if given.lag_budget is not None and seen.lag > given.lag_budget:
        why = f"data is {seen.lag:.1f} updates old on average (budget {given.lag_budget:g})"
        yield Suggestion(QUEUE, queue.times(0.5), Aim.LAG, f"{why}: a shorter queue holds less of it")
    if seen.queue_fill > high and seen.learner_waiting < WAITS:
        why = f"the queue is {seen.queue_fill:.0%} full (target {low:.0%} to {high:.0%})"
        if workers:
            yield Suggestion(WORKERS, workers.times(0.5), Aim.LESS, f"{why}: fewer workers bring as much as is taken")
        yield Suggestion(QUEUE, queue.times(0.5), Aim.LAG, f"{why}: a shorter one holds fresher data")
    elif seen.queue_fill < low and seen.learner_waiting < WAITS:
        why = f"the queue is {seen.queue_fill:.0%} full (target {low:.0%} to {high:.0%})"
        yield Suggestion(QUEUE, queue.times(0.5), Aim.QUEUE, f"{why}: less room will do")


def _needed(workers: Knob, seen: Observation) -> float:
    """As many as were busy and a quarter more; but not less than a quarter of them at once."""
    busy = min(0.5, max(0.25, 1.25 * seen.workers_busy))
    return workers.times(busy)
