"""What one window of a run looks like: how fast it was, how sure that is, and who waited for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Observation:
    """Means over a window; shares lie between 0 and 1."""

    seconds: float
    steps_per_second: float
    noise: float = 0.0
    """Standard error of the rate, as a share of it."""
    learner_waiting: float = 0.0
    """Of the learner's time: it needs more to learn from."""
    workers_busy: float = 1.0
    workers_waiting_for_slot: float = 0.0
    workers_waiting_for_weights: float = 0.0
    cpu: float = 0.0
    """Of all cores."""
    queue_fill: float | None = None
    """Where a mode has a queue."""
    dropped: float = 0.0
    """Of the steps that were collected: those that a full queue has dropped."""
    buffer_fill: float | None = None
    """Where an algorithm has a buffer of steps."""
    lag: float = 0.0
    """Mean over the steps that were trained."""


def pool(windows: Sequence[Observation]) -> Observation:
    """Several windows as one; what they disagree about is noise too."""
    if len(windows) == 1:
        return windows[0]
    total = sum(window.seconds for window in windows)
    means: dict[str, Any] = {}
    for name in (field.name for field in fields(Observation) if field.name != "seconds"):
        values = [(getattr(window, name), window.seconds) for window in windows]
        known = [(value, seconds) for value, seconds in values if value is not None]
        weight = sum(seconds for _, seconds in known)
        means[name] = sum(value * seconds for value, seconds in known) / weight if known else None
    pooled = replace(windows[-1], **means, seconds=total)
    rates, mean = [window.steps_per_second for window in windows], pooled.steps_per_second
    if mean <= 0:
        return pooled
    within = math.sqrt(sum((window.noise * window.seconds / total) ** 2 for window in windows))
    between = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) * (len(rates) - 1))) / mean
    return replace(pooled, noise=max(within, between))
