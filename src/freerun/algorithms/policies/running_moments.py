"""A running mean and variance, merged batch by batch; and which observations are scaled by them."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from freerun.core import LearnerGroup, SingleLearner

EPSILON = 1e-8
"""Added to the variance, so that a constant does not divide by zero."""


class RunningMoments:
    """The mean and variance of all rows seen so far."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.count = 0.0
        self.mean: NDArray[np.float64] = np.zeros(shape)
        self.variance: NDArray[np.float64] = np.ones(shape)

    def update(self, rows: Tensor, learner_group: LearnerGroup | None = None) -> None:
        """Add these rows, and those that the other learners add in the same call."""
        mean, variance = self.mean, self.variance  # placeholders for a batch without rows, which `merge` skips
        if len(rows):
            # In float64: squares of large observations lose their digits in float32.
            variance, mean = (moment.cpu().numpy() for moment in torch.var_mean(rows.double(), dim=0, correction=0))
        # Every learner merges the batches of all in the same order, so that all end with the same bits.
        for moments in (learner_group or SingleLearner()).gather((len(rows), mean, variance)):
            self.merge(*moments)

    def merge(self, count: float, mean: NDArray[np.float64], variance: NDArray[np.float64]) -> None:
        """Merge the moments of a batch b into those of all rows a (Chan et al. 1979: the parallel variance formula)."""
        if count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.variance = float(count), mean, variance
            return
        total = self.count + count
        delta = mean - self.mean
        # M2 = n_a * var_a + n_b * var_b + delta^2 * n_a * n_b / (n_a + n_b)
        sum_of_squares = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        # mean = mean_a + delta * n_b / (n_a + n_b)
        self.mean = self.mean + delta * count / total
        self.variance = sum_of_squares / total
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


def needs_normalizing(space: spaces.Box) -> NDArray[np.bool_]:
    """True for each number of an observation, flat, whose range goes beyond -1 to 1; False for images.

    Numbers within -1 to 1 have a fitting scale already. Bits that are rarely set would even be hurt: dividing by their
    small deviation makes them larger than anything else.
    """
    if len(space.shape) > 2 or space.dtype == np.uint8:
        return np.zeros(math.prod(space.shape), np.bool_)
    is_beyond: NDArray[np.bool_] = ((space.low < -1) | (space.high > 1)).reshape(-1)
    return is_beyond
