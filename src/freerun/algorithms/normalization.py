"""Running mean and variance, merged batch by batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freerun.core import Alone, Peers

EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of all rows seen so far (Chan et al. 1979: merge the moments of two sets)."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.count = 0.0
        self.mean: NDArray[np.float64] = np.zeros(shape)
        self.variance: NDArray[np.float64] = np.ones(shape)

    def update(self, rows: Tensor, peers: Peers | None = None) -> None:
        """Add these rows, and those of the other learners."""
        variance, mean = (moment.cpu().numpy() for moment in torch.var_mean(rows.double(), dim=0, correction=0))
        for moments in (peers or Alone()).gather((len(rows), mean, variance)):
            self._merge(*moments)

    def _merge(self, count: int, mean: NDArray[np.float64], variance: NDArray[np.float64]) -> None:
        if count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.variance = float(count), mean, variance
            return
        total = self.count + count
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        self.mean = self.mean + delta * count / total
        self.variance = squares / total
        self.count = total

    @property
    def scale(self) -> NDArray[np.float64]:
        """One over the standard deviation."""
        return 1.0 / np.sqrt(self.variance + EPSILON)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count = float(state["count"])  # type: ignore[arg-type]
        self.mean = np.asarray(state["mean"])
        self.variance = np.asarray(state["variance"])
