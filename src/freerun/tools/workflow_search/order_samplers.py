"""Samplers: which order to train next, and which one to recommend in the end.

A sampler keeps nothing between two calls: it decides by the finished trials, so a search can go on after a kill.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from freerun.tools.workflow_search.order_model import OrderTrial, Posterior, fit
from freerun.tools.workflow_search.precedence import ORDERS, ScoreArray

NUM_FIRST_TRIALS = 4
"""Orders that the Gaussian process draws at random before it has scores enough to fit. In simulated searches, 2 to 8
were equally good."""
NUM_OUTCOMES = 15
"""Possible scores of the next trial over which its worth is averaged (points of Gauss-Hermite quadrature)."""
FINAL_RUNG = 2
"""Successive halving ends when this many orders are left: training the last one again would decide nothing."""


class OrderSampler(Protocol):
    """Chooses orders. An order is known by its place in `precedence.ORDERS`."""

    def propose(self, finished: Sequence[OrderTrial], pending: Sequence[int], rng: np.random.Generator) -> int | None:
        """Return the order to train next; None if that depends on trials that are still pending."""
        ...

    def best(self, finished: Sequence[OrderTrial]) -> int:
        """Return the order that the finished trials recommend: always one that was trained."""
        ...


class GPSampler:
    """Bayesian optimisation: it trains the order whose next score is expected to help the final choice most.

    While other trainings run, whose scores may help as much, it uses Thompson sampling: it draws a score for every
    order from the posterior, and proposes the order whose draw is the highest. Draws differ, so trainings do.
    """

    def __init__(self, budget_trials: int, seed: int):
        # All of the budget must not go into orders that are drawn at random.
        self._num_first = min(NUM_FIRST_TRIALS, math.ceil(budget_trials / 2))
        self._first = np.random.default_rng(seed).permutation(len(ORDERS))[: self._num_first]

    def propose(self, finished: Sequence[OrderTrial], pending: Sequence[int], rng: np.random.Generator) -> int | None:
        known = {*(trial.order for trial in finished), *pending}
        if waiting := [int(order) for order in self._first if order not in known]:
            return waiting[0]
        if not finished:
            return None
        posterior = fit(finished)
        return int(np.argmax(posterior.sample(rng) if pending else knowledge_gradient(posterior)))

    def best(self, finished: Sequence[OrderTrial]) -> int:
        trained = _trained(finished)
        return trained[int(np.argmax(fit(finished).mean[trained]))]


class RandomSampler:
    """Random search: orders are drawn without repetition while there are new ones."""

    def __init__(self, budget_trials: int, seed: int):
        self._shuffled = np.random.default_rng(seed).permutation(len(ORDERS))

    def propose(self, finished: Sequence[OrderTrial], pending: Sequence[int], rng: np.random.Generator) -> int | None:
        tried = Counter([*(trial.order for trial in finished), *pending])
        return int(min(self._shuffled, key=lambda order: tried[int(order)]))

    def best(self, finished: Sequence[OrderTrial]) -> int:
        means = mean_scores(finished)
        return max(means, key=lambda order: means[order])


class HalvingSampler:
    """Successive halving: every order of a rung is trained once more, and the better half makes the next rung."""

    def __init__(self, budget_trials: int, seed: int):
        self._num_first = max(n for n in range(1, len(ORDERS) + 1) if n == 1 or sum(_rungs(n)) <= budget_trials)
        self._first = [int(order) for order in np.random.default_rng(seed).permutation(len(ORDERS))[: self._num_first]]

    def propose(self, finished: Sequence[OrderTrial], pending: Sequence[int], rng: np.random.Generator) -> int | None:
        done = Counter(trial.order for trial in finished)
        started = done + Counter(pending)
        rung = self._first
        for number, next_size in enumerate([*_rungs(self._num_first)[1:], FINAL_RUNG], start=1):
            # With several seeds per trial an order has more trials than trials. The first rungs are then met early,
            # which is right: they have the evidence.
            if lacking := [order for order in rung if started[order] < number]:
                return lacking[0]
            if any(done[order] < number for order in rung):
                return None
            means = mean_scores(finished)
            rung = sorted(rung, key=lambda order: -means[order])[:next_size]
        # What is left of the budget decides between the last ones.
        return min(rung, key=lambda order: started[order])

    def best(self, finished: Sequence[OrderTrial]) -> int:
        means, done = mean_scores(finished), Counter(trial.order for trial in finished)
        return max(means, key=lambda order: (min(done[order], len(_rungs(self._num_first))), means[order]))


SAMPLERS: dict[str, type[GPSampler] | type[RandomSampler] | type[HalvingSampler]] = {
    "gp": GPSampler,
    "random": RandomSampler,
    "halving": HalvingSampler,
}
"""The samplers by the names that --sampler takes. Each is made with the number of trials and a seed."""


def knowledge_gradient(posterior: Posterior) -> ScoreArray:
    """Return by how much a trial of each order is expected to raise the highest posterior mean.

    A trial of order j whose score is z deviations above its expectation moves the mean of every order i by
    z * covariance[i, j] / sqrt(covariance[j, j] + noise variance), and z is normally distributed.
    """
    moves = posterior.covariance / np.sqrt(posterior.deviation**2 + posterior.noise_variance)
    outcomes, weights = np.polynomial.hermite_e.hermegauss(NUM_OUTCOMES)
    highest = np.array([(posterior.mean[:, None] + outcome * moves).max(axis=0) for outcome in outcomes])
    gradient: ScoreArray = weights @ highest / weights.sum() - posterior.mean.max()
    return gradient


def mean_scores(finished: Sequence[OrderTrial]) -> dict[int, float]:
    """Return the mean score of each order that was trained."""
    scores: dict[int, list[float]] = defaultdict(list)
    for trial in finished:
        scores[trial.order].append(trial.score)
    return {order: sum(found) / len(found) for order, found in scores.items()}


def _trained(finished: Sequence[OrderTrial]) -> list[int]:
    return sorted({trial.order for trial in finished})


def _rungs(size: int) -> list[int]:
    """Return the sizes of the rungs of successive halving, from the first one to the last."""
    sizes = [size]
    while sizes[-1] > FINAL_RUNG:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes
