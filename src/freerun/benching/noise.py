"""What may be called a difference: two ways of collecting differ if the ranges of their runs lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN_SPREAD = 0.1
"""What a figure that was measured once may be off by, at least, for all one knows."""
QUIET, NOISY = 0.05, 0.15


def spread(runs: Sequence[float]) -> float | None:
    """From the lowest to the highest, as a share of the median; None of fewer than two."""
    return (max(runs) - min(runs)) / statistics.median(runs) if len(runs) > 1 else None


@dataclass(frozen=True)
class Range:
    """Where the true rate may lie."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, runs: Sequence[float], noise: float | None) -> Range:
        """Of its runs, and never narrower than the noise of the machine: median ± half the spread of the bare limit."""
        middle = statistics.median(runs)
        known = UNKNOWN_SPREAD if noise is None else noise
        least = known if len(runs) > 1 else max(known, UNKNOWN_SPREAD)
        return cls(min(*runs, middle * (1 - least / 2)), middle, max(*runs, middle * (1 + least / 2)))

    def is_above(self, other: Range) -> bool:
        """Whether the difference may be called one."""
        return self.low > other.high


def told(spread_of_limit: float | None, others: float) -> str:
    """How noisy the machine was, in a word; `others` as a share of all cores."""
    worst = max(UNKNOWN_SPREAD if spread_of_limit is None else spread_of_limit, others)
    return "quiet" if worst <= QUIET else "noisy" if worst <= NOISY else "very noisy"
