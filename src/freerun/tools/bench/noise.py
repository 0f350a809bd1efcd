"""Decides what counts as a difference: two modes differ if the ranges of their runs lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN_SPREAD = 0.1
"""The spread that is assumed for a figure that was measured only once."""
QUIET, NOISY = 0.05, 0.15
"""The largest spread, or share of the cores used by others, of a `quiet` and of a `noisy` machine."""


def relative_spread(runs: Sequence[float]) -> float | None:
    """Return (highest - lowest) / median; None for fewer than two runs."""
    return (max(runs) - min(runs)) / statistics.median(runs) if len(runs) > 1 else None


@dataclass(frozen=True)
class Range:
    """The range in which the true rate may lie."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, runs: Sequence[float], noise: float | None) -> Range:
        """Return the range of some runs, at least as wide as the noise: median ± half the spread of the bare limit."""
        middle = statistics.median(runs)
        known_spread = UNKNOWN_SPREAD if noise is None else noise
        least = known_spread if len(runs) > 1 else max(known_spread, UNKNOWN_SPREAD)
        # low = min(runs, median * (1 - least / 2)), high = max(runs, median * (1 + least / 2))
        return cls(min(*runs, middle * (1 - least / 2)), middle, max(*runs, middle * (1 + least / 2)))

    def is_above(self, other: Range) -> bool:
        """Return whether this rate is higher by more than the noise."""
        # Ranges that overlap could belong to the same true rate.
        return self.low > other.high


def noise_word(spread_of_limit: float | None, others: float) -> str:
    """Say how noisy the machine was; `others` is the share of all cores that other programs used."""
    # Either sign is enough: a varying limit, or other programs on the cores.
    worst = max(UNKNOWN_SPREAD if spread_of_limit is None else spread_of_limit, others)
    return "quiet" if worst <= QUIET else "noisy" if worst <= NOISY else "very noisy"
