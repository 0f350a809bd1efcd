"""What one window of a run looks like: how fast the run was, how certain that is, and who waited for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Observation:
    """Means over a window. Shares lie between 0 and 1."""

    seconds: float
    steps_per_second: float
    noise: float = 0.0
    """The standard error of the rate, as a share of the rate."""
    learner_waiting: float = 0.0
    """The share of its time that the learner waited for data."""
    workers_busy: float = 1.0
    workers_waiting_for_slot: float = 0.0
    workers_waiting_for_weights: float = 0.0
    cpu: float = 0.0
    """The used share of all cores."""
    queue_fill: float | None = None
    """None where the mode has no queue."""
    dropped: float = 0.0
    """The share of the collected steps that a full queue dropped."""
    buffer_fill: float | None = None
    """None where the algorithm has no replay buffer."""
    lag: float = 0.0
    """The mean over the steps that were trained."""


def pool(windows: Sequence[Observation]) -> Observation:
    """Several windows as one. Where they disagree, that is noise too."""
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
    # Standard error within the windows: sqrt(sum_k (noise_k * seconds_k / seconds)^2)
    within = math.sqrt(sum((window.noise * window.seconds / total) ** 2 for window in windows))
    # Standard error of the mean of n windows: sqrt(sum_k (rate_k - mean)^2 / (n * (n - 1)))
    between = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) * (len(rates) - 1))) / mean
    return replace(pooled, noise=max(within, between))
