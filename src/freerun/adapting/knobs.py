"""What may be moved: a value between two bounds, and how far a move goes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Knob:
    """A setting as the tuner sees it: a number, its bounds, and nothing of what it does."""

    name: str
    value: float
    low: float
    high: float
    is_whole: bool = True
    """Whether only whole numbers make sense."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.value <= self.high:
            raise ValueError(f"{self.name} is {self.value}, which does not lie between {self.low} and {self.high}")

    def fit(self, value: float) -> float:
        """The nearest value that it may have."""
        value = min(self.high, max(self.low, value))
        return float(round(value)) if self.is_whole else value

    def times(self, factor: float) -> float:
        """Where a move by this factor leads: another value, if the bounds leave room for one."""
        wanted = self.value * factor
        if self.is_whole:
            wanted = math.ceil(wanted) if factor > 1 else math.floor(wanted)
        return self.fit(wanted)


def halfway(a: float, b: float) -> float:
    """Between two values, as factors go."""
    return math.sqrt(a * b)
