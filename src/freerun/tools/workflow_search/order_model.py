"""A Gaussian process over the 120 orders: what the trials so far say about the score of every order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freerun.tools.workflow_search.precedence import DISTANCES, ORDERS, ScoreArray

DECAYS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""By how much the logarithm of the correlation of two orders falls with each pair on which they disagree."""
NOISE_RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""The variance between trials of the same order, in units of the variance between orders."""
SEED_SHARES = (0.0, 0.3)
"""The part of that variance that a seed causes in all orders alike."""
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
    seed: int = 0
    """The first of its seeds. Trials with the same seeds share what these do to all orders alike."""


@dataclass(frozen=True)
class Hyperparameters:
    """What the model assumes about scores before it has seen any: score = order + seed + the rest of the noise."""

    variance: float
    """The variance between orders."""
    decay: float
    """The correlation of two orders is exp(-decay * Kendall distance): the Mallows kernel."""
    noise_variance: float
    """The variance between trials of one order, because their seeds differ."""
    seed_share: float
    """The part of it that is the same for all orders."""


@dataclass(frozen=True)
class Posterior:
    """The scores of all orders, given the trials: a normal distribution."""

    mean: ScoreArray
    covariance: ScoreArray
    noise_variance: float
    """The variance between trials of one order."""
    next_covariance: ScoreArray
    """The covariance of each order (row) with the score that the next trial of each order (column) will have."""
    next_variance: ScoreArray
    """The variance of the score of each order's next trial, noise included."""

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


class _Design:
    """Which orders and seeds the trials have. The state of the model is the score of every order, then the effect of
    every seed; the last seed is one that no trial has had."""

    def __init__(self, trials: Sequence[OrderTrial]):
        seeds = sorted({trial.seed for trial in trials})
        self.orders = [trial.order for trial in trials]
        self.scores = np.array([trial.score for trial in trials])
        self.num_seeds = len(seeds) + 1
        self.places = [len(ORDERS) + seeds.index(trial.seed) for trial in trials]
        """Where the effects of the trials' seeds are in the state."""
        had = set(zip(self.orders, self.places, strict=True))
        later = range(len(ORDERS), len(ORDERS) + self.num_seeds)
        self.next_places = [next(place for place in later if (order, place) not in had) for order in range(len(ORDERS))]
        """The seed of each order's next trial: the first that it has not had."""

    def correlation(self, decay: float, ratio: float, share: float) -> ScoreArray:
        """Return the covariance of the trials' scores in units of the variance between orders."""
        same_seed = np.equal.outer(self.places, self.places)
        noise = ratio * ((1 - share) * np.eye(len(self.scores)) + share * same_seed)
        correlation: ScoreArray = np.exp(-decay * DISTANCES[np.ix_(self.orders, self.orders)]) + noise
        return correlation


def condition(trials: Sequence[OrderTrial], assumed: Hyperparameters) -> Posterior:
    """Return the exact posterior of a Gaussian process whose mean is a constant of which nothing is known before.

    With C the covariance of the trials and k that of the trials with the state, the mean is m + k' C^-1 (scores - m),
    where m = 1' C^-1 scores / 1' C^-1 1. The covariance is K - k' C^-1 k + u u' / 1' C^-1 1: the last term is the
    uncertainty of m, with u = 1 - k' C^-1 1 (for orders; seeds have the mean 0).
    """
    design, num_orders = _Design(trials), len(ORDERS)
    kernel = np.diag([assumed.noise_variance * assumed.seed_share] * (num_orders + design.num_seeds))
    kernel[:num_orders, :num_orders] = assumed.variance * np.exp(-assumed.decay * DISTANCES)
    ratio = assumed.noise_variance / assumed.variance
    covariance = assumed.variance * design.correlation(assumed.decay, ratio, assumed.seed_share)
    shared = kernel[design.orders] + kernel[design.places]
    gain, weights = np.linalg.solve(covariance, shared), np.linalg.solve(covariance, np.ones(len(trials)))
    mean = weights @ design.scores / weights.sum()
    unexplained = (np.arange(len(kernel)) < num_orders) - shared.T @ weights
    state = kernel - shared.T @ gain + np.outer(unexplained, unexplained) / weights.sum()
    orders, following = np.arange(num_orders), design.next_places
    with_next = state[:, orders] + state[:, following]
    rest = assumed.noise_variance * (1 - assumed.seed_share)
    return Posterior(
        mean + (gain.T @ (design.scores - mean))[:num_orders],
        state[:num_orders, :num_orders],
        assumed.noise_variance,
        with_next[:num_orders],
        with_next[orders, orders] + with_next[following, orders] + rest,
    )


def fit(trials: Sequence[OrderTrial]) -> Posterior:
    """Return the posterior, averaged over the hyperparameters by how likely each of them makes these scores.

    The average is robust where few trials leave the noise open: the best hyperparameters alone are often too certain.
    """
    likelihoods, assumptions = zip(*assess(trials), strict=True)
    weights = np.exp(np.array(likelihoods) - max(likelihoods))
    weights = np.where(weights > LEAST_WEIGHT * weights.sum(), weights, 0.0)
    parts = [
        (weight, condition(trials, assumed))
        for weight, assumed in zip(weights / weights.sum(), assumptions, strict=True)
        if weight > 0
    ]
    mean: ScoreArray = sum(weight * part.mean for weight, part in parts)
    # The law of total variance: the mean of the covariances, and the covariance of the means.
    shifts = [(weight, part, part.mean - mean) for weight, part in parts]
    return Posterior(
        mean,
        sum(weight * (part.covariance + np.outer(shift, shift)) for weight, part, shift in shifts),
        sum(weight * part.noise_variance for weight, part in parts),
        sum(weight * (part.next_covariance + np.outer(shift, shift)) for weight, part, shift in shifts),
        sum(weight * (part.next_variance + shift**2) for weight, part, shift in shifts),
    )


def assess(trials: Sequence[OrderTrial]) -> list[tuple[float, Hyperparameters]]:
    """Return the logarithm of the marginal likelihood, up to a constant, for each point of the grid.

    Decay, noise ratio and seed share come from the grid. The mean and the logarithm of the variance are integrated out,
    with flat priors (the restricted likelihood): inserting the best ones would favour smooth and certain models.
    """
    design = _Design(trials)
    found: list[tuple[float, Hyperparameters]] = []
    for decay, ratio, share in itertools.product(DECAYS, NOISE_RATIOS, SEED_SHARES):
        # The covariance of the scores is variance * correlation.
        correlation = design.correlation(decay, ratio, share)
        precision = np.linalg.inv(correlation)
        rest = design.scores - precision.sum(axis=0) @ design.scores / precision.sum()
        freedom = len(trials) - 1  # one degree of freedom went into the mean
        variance = max(LEAST_VARIANCE, float(rest @ precision @ rest) / max(1, freedom))
        # log p = -(n - 1)/2 log(variance) - 1/2 log det(correlation) - 1/2 log(1' correlation^-1 1)
        determinants = np.linalg.slogdet(correlation)[1] + np.log(precision.sum())
        likelihood = -0.5 * freedom * np.log(variance) - 0.5 * determinants
        found.append((float(likelihood), Hyperparameters(variance, decay, ratio * variance, share)))
    return found
