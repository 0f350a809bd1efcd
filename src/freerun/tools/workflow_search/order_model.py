"""A Gaussian process over the 120 orders: what the trials so far say about the score of every order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freerun.tools.workflow_search.precedence import DISTANCES, ScoreArray

DECAYS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""By how much the logarithm of the correlation of two orders falls with each pair on which they disagree."""
NOISE_RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""The variance between trials of the same order, in units of the variance between orders."""
LEAST_VARIANCE = 1e-12
"""Scores that are all equal would otherwise have the variance 0, whose logarithm is minus infinity."""

LEAST_WEIGHT = 0.01
"""Hyperparameters with a smaller share in the average than this are left out of it."""


class OrderTrial(NamedTuple):
    """A finished trial: an order that was trained, with one seed or with several."""

    order: int
    """The place of the order in `precedence.ORDERS`."""
    score: float
    """The mean score of its trainings."""


@dataclass(frozen=True)
class Hyperparameters:
    """What the model assumes about scores before it has seen any."""

    variance: float
    """The variance between orders."""
    decay: float
    """The correlation of two orders is exp(-decay * Kendall distance): the Mallows kernel."""
    noise_variance: float
    """The variance between trials of one order, because their seeds differ."""


@dataclass(frozen=True)
class Posterior:
    """The scores of all orders, given the trials: a normal distribution."""

    mean: ScoreArray
    covariance: ScoreArray
    noise_variance: float
    """The variance between trials of one order, because their seeds differ."""

    @property
    def deviation(self) -> ScoreArray:
        """The standard deviation of each order's score, without the noise of a single trial."""
        deviation: ScoreArray = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return deviation

    def sample(self, rng: np.random.Generator) -> ScoreArray:
        """Draw one possible score for every order, all of them together (for Thompson sampling)."""
        # By eigenvalues, because rounding may leave the covariance with slightly negative ones.
        values, vectors = np.linalg.eigh(self.covariance)
        draw: ScoreArray = self.mean + vectors @ (np.sqrt(np.maximum(values, 0.0)) * rng.standard_normal(len(values)))
        return draw


def condition(trials: Sequence[OrderTrial], assumed: Hyperparameters) -> Posterior:
    """Return the exact posterior of a Gaussian process whose mean is a constant of which nothing is known before.

    With C the covariance of the trials and k that of the trials with all orders, the mean is m + k' C^-1 (scores - m),
    where m = 1' C^-1 scores / 1' C^-1 1. The covariance is K - k' C^-1 k + u u' / 1' C^-1 1: the last term is the
    uncertainty of m, with u = 1 - k' C^-1 1.
    """
    kernel = assumed.variance * np.exp(-assumed.decay * DISTANCES)
    seen = [trial.order for trial in trials]
    scores = np.array([trial.score for trial in trials])
    covariance = kernel[np.ix_(seen, seen)] + assumed.noise_variance * np.eye(len(seen))
    gain, weights = np.linalg.solve(covariance, kernel[seen]), np.linalg.solve(covariance, np.ones(len(seen)))
    mean = weights @ scores / weights.sum()
    unexplained = 1.0 - kernel[seen].T @ weights
    return Posterior(
        mean + gain.T @ (scores - mean),
        kernel - kernel[seen].T @ gain + np.outer(unexplained, unexplained) / weights.sum(),
        assumed.noise_variance,
    )


def fit(trials: Sequence[OrderTrial]) -> Posterior:
    """Return the posterior, averaged over the hyperparameters by how likely each of them makes these scores.

    The average is robust where few trials leave the noise open: the best hyperparameters alone are often too certain.
    """
    likelihoods, assumptions = zip(*assess(trials), strict=True)
    weights = np.exp(np.array(likelihoods) - max(likelihoods))
    parts = [
        (weight, condition(trials, assumed))
        for weight, assumed in zip(weights / weights.sum(), assumptions, strict=True)
        if weight > LEAST_WEIGHT
    ]
    total = sum(weight for weight, _ in parts)
    mean: ScoreArray = sum(weight * part.mean for weight, part in parts) / total
    # The law of total variance: the mean of the covariances, and the covariance of the means.
    shifts = [(weight, part, part.mean - mean) for weight, part in parts]
    covariance = sum(weight * (part.covariance + np.outer(shift, shift)) for weight, part, shift in shifts) / total
    return Posterior(mean, covariance, sum(weight * part.noise_variance for weight, part in parts) / total)


def assess(trials: Sequence[OrderTrial]) -> list[tuple[float, Hyperparameters]]:
    """Return the logarithm of the marginal likelihood, up to a constant, for each point of the grid.

    Decay and noise ratio come from the grid. The mean and the logarithm of the variance are integrated out, with flat
    priors (the restricted likelihood): inserting the best ones instead would favour smooth and certain models.
    """
    scores = np.array([trial.score for trial in trials])
    seen = [trial.order for trial in trials]
    found: list[tuple[float, Hyperparameters]] = []
    for decay, ratio in itertools.product(DECAYS, NOISE_RATIOS):
        # The covariance of the scores is variance * correlation.
        correlation = np.exp(-decay * DISTANCES[np.ix_(seen, seen)]) + ratio * np.eye(len(seen))
        precision = np.linalg.inv(correlation)
        rest = scores - precision.sum(axis=0) @ scores / precision.sum()
        freedom = len(scores) - 1  # one degree of freedom went into the mean
        variance = max(LEAST_VARIANCE, float(rest @ precision @ rest) / max(1, freedom))
        # log p = -(n - 1)/2 log(variance) - 1/2 log det(correlation) - 1/2 log(1' correlation^-1 1)
        determinants = np.linalg.slogdet(correlation)[1] + np.log(precision.sum())
        likelihood = -0.5 * freedom * np.log(variance) - 0.5 * determinants
        found.append((float(likelihood), Hyperparameters(variance, decay, ratio * variance)))
    return found
