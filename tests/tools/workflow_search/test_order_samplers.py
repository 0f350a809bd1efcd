"""Samplers: they find the best of a known table, and successive halving keeps to its rungs."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from freerun.tools.workflow_search.order_model import OrderTrial, Posterior
from freerun.tools.workflow_search.order_samplers import SAMPLERS, knowledge_gradient
from freerun.tools.workflow_search.precedence import PAIRS, SIGNS, ScoreArray

NOISE = 1.0


def table(seed: int) -> ScoreArray:
    """Scores of all orders that differ by which group precedes which, with a deviation of some six times the noise."""
    scores: ScoreArray = SIGNS @ (2.0 * np.random.default_rng(seed).standard_normal(len(PAIRS)))
    return scores


def replay(name: str, seed: int, budget: int) -> tuple[int, list[OrderTrial]]:
    truth, noise = table(seed), np.random.default_rng([seed, 1])
    sampler, finished = SAMPLERS[name](budget, seed), list[OrderTrial]()
    for trial in range(budget):
        order = sampler.propose(finished, [], np.random.default_rng([seed, trial]))
        assert order is not None
        finished.append(OrderTrial(order, float(truth[order] + NOISE * noise.standard_normal())))
    return sampler.best(finished), finished


def test_the_gaussian_process_finds_the_best_in_30_trials() -> None:
    hits = [table(seed).max() - table(seed)[replay("gp", seed, 30)[0]] <= NOISE for seed in range(10)]
    assert sum(hits) >= 8


def test_the_gaussian_process_is_better_than_random_search() -> None:
    lost = {
        name: np.mean([table(seed).max() - table(seed)[replay(name, seed, 20)[0]] for seed in range(10)])
        for name in ("gp", "random")
    }
    assert lost["gp"] < 0.5 * lost["random"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_history_gives_the_same_proposal(name: str) -> None:
    """So a search that was killed goes on as it would have."""
    _, finished = replay(name, 5, 14)
    first, second = (SAMPLERS[name](14, 5).propose(finished[:9], [], np.random.default_rng(1)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", SAMPLERS)
def test_proposals_in_parallel_differ(name: str) -> None:
    _, finished = replay(name, 2, 9)
    sampler, pending = SAMPLERS[name](30, 2), list[int]()
    for trial in range(4):
        order = sampler.propose(finished, pending, np.random.default_rng(trial))
        if order is not None:
            pending.append(order)
    assert len(set(pending)) > 1


def test_the_knowledge_gradient_of_orders_that_are_not_correlated() -> None:
    covariance = np.diag([1.0, 1.0, 0.0])
    found = knowledge_gradient(Posterior(np.array([0.0, -9.0, 0.0]), covariance, noise_variance=3.0))
    # A score of the first order moves its mean by z / sqrt(1 + 3), and max(0, z / 2) has the mean 0.5 / sqrt(2 pi). The
    # second order can hardly become the best one, and nothing is left to learn about the third.
    assert found[0] == pytest.approx(0.5 / math.sqrt(2 * math.pi), rel=0.1)
    assert found[1] == pytest.approx(0.0, abs=1e-6)
    assert found[2] == pytest.approx(0.0, abs=1e-12)


def test_random_search_repeats_nothing() -> None:
    _, finished = replay("random", 0, 120)
    assert len({trial.order for trial in finished}) == 120


def test_successive_halving_spends_its_budget_on_the_better_half() -> None:
    # 16 orders once, the best 8 again, the best 4, the best 2: 30 trials.
    best, finished = replay("halving", 1, 30)
    assert sorted(Counter(trial.order for trial in finished).values(), reverse=True) == [4] * 2 + [3] * 2 + [
        *[2] * 4,
        *[1] * 8,
    ]
    first = sorted(finished[:16], key=lambda trial: -trial.score)
    assert {trial.order for trial in finished[16:24]} == {trial.order for trial in first[:8]}
    assert best in {trial.order for trial in finished[28:]}


def test_successive_halving_waits_for_its_rung() -> None:
    sampler, rng = SAMPLERS["halving"](30, 1), np.random.default_rng(0)
    _, finished = replay("halving", 1, 16)
    pending = [trial.order for trial in replay("halving", 1, 30)[1][15:16]]
    assert sampler.propose(replay("halving", 1, 30)[1][:15], pending, rng) is None
    assert len(finished) == 16
