"""The Gaussian process over orders, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from freerun.tools.workflow_search.order_model import (
    DECAYS,
    NOISE_RATIOS,
    Hyperparameters,
    OrderTrial,
    assess,
    condition,
    fit,
)
from freerun.tools.workflow_search.precedence import DISTANCES, ORDERS, PAIRS, SIGNS
from freerun_envs.workflow import GROUPS, read_order

A = ORDERS.index("defender,enterprise,op_server,op_host,user")
B = ORDERS.index("enterprise,defender,op_server,op_host,user")  # one neighbouring swap from A
C = ORDERS.index("enterprise,op_server,defender,op_host,user")  # another one from B
REVERSED = ORDERS.index("user,op_host,op_server,enterprise,defender")
# Each disagreement halves the correlation.
HALVING = Hyperparameters(variance=1.0, decay=math.log(2), noise_variance=0.5)


def test_there_are_120_different_orders() -> None:
    assert len(set(ORDERS)) == math.factorial(len(GROUPS)) == 120
    assert all(",".join(read_order(order)) == order for order in ORDERS)
    assert len({tuple(signs) for signs in SIGNS.tolist()}) == 120
    assert SIGNS.shape == (120, len(PAIRS)) == (120, 10)


def disagreements(one: str, other: str) -> int:
    """Kendall's distance, counted pair by pair."""
    first, second = one.split(","), other.split(",")
    return sum(
        (first.index(a) < first.index(b)) != (second.index(a) < second.index(b))
        for a, b in itertools.combinations(GROUPS, 2)
    )


def test_distances_are_kendalls() -> None:
    assert [DISTANCES[A, other] for other in (A, B, C, REVERSED)] == [0, 1, 2, 10]
    for one, other in itertools.product((A, 17, 58, REVERSED), range(0, 120, 7)):
        assert DISTANCES[one, other] == disagreements(ORDERS[one], ORDERS[other])


@pytest.mark.parametrize("decay", [0.05, 0.5])
def test_an_rbf_on_the_signs_is_the_mallows_kernel(decay: float) -> None:
    squared = ((SIGNS[:, None] - SIGNS[None]) ** 2).sum(axis=2)
    length_scale = math.sqrt(2 / decay)  # exp(-4 d / (2 l^2)) = exp(-decay d)
    rbf = np.exp(-squared / (2 * length_scale**2))
    np.testing.assert_allclose(rbf, np.exp(-decay * DISTANCES))
    assert np.linalg.eigvalsh(rbf).min() > 0


def test_the_posterior_after_one_trial() -> None:
    posterior = condition([OrderTrial(A, 3.0)], HALVING)
    # Nothing is known of the mean of all orders, so one score speaks for all of them.
    np.testing.assert_allclose(posterior.mean, 3.0)
    # What is not known of A is the noise. B differs from A with the variance 1 + 1 - 2 * 0.5, C with 1 + 1 - 2 * 0.25.
    np.testing.assert_allclose(posterior.deviation[[A, B, C]] ** 2, [0.5, 1.0 + 0.5, 1.5 + 0.5])
    assert posterior.covariance[A, B] == pytest.approx(0.5)


def test_the_posterior_after_two_trials() -> None:
    posterior = condition([OrderTrial(A, 3.0), OrderTrial(B, 0.0)], HALVING)
    # Around their mean 1.5 the scores are [1.5, -1.5], an eigenvector of [[1.5, 0.5], [0.5, 1.5]] with eigenvalue 1.
    np.testing.assert_allclose(posterior.mean[A], 1.5 + 1.5 - 1.5 / 2)
    np.testing.assert_allclose(posterior.mean[B], 1.5 + 1.5 / 2 - 1.5)
    np.testing.assert_allclose(posterior.mean[C], 1.5 + 1.5 / 4 - 1.5 / 2)


def test_the_marginal_likelihood_of_two_trials_of_one_order() -> None:
    found = assess([OrderTrial(A, 6.0), OrderTrial(A, 4.0)])
    assert len(found) == len(DECAYS) * len(NOISE_RATIOS)
    for likelihood, assumed in found:
        # Around the mean 5 the scores are (1, -1): with one degree of freedom left, the variance between them is 2.
        assert assumed.noise_variance == pytest.approx(2.0)
        # They say nothing about how other orders differ. [[1 + r, 1], [1, 1 + r]] has the eigenvalues r, for (1, -1),
        # and 2 + r, so the variance is 2 / r, and 1' C^-1 1 is 2 / (2 + r): the product with r (2 + r) is always 4.
        assert likelihood == pytest.approx(-0.5 * math.log(4))


def test_the_marginal_likelihood_is_the_integral_over_mean_and_variance() -> None:
    trials = [OrderTrial(A, 1.0), OrderTrial(B, 2.0), OrderTrial(REVERSED, -1.0), OrderTrial(C, 0.5)]
    scores, seen = np.array([trial.score for trial in trials]), [trial.order for trial in trials]
    means, logs = np.meshgrid(np.linspace(-60, 60, 1201), np.linspace(-6, 14, 401))
    integrals = []
    for decay, ratio in itertools.product(DECAYS, NOISE_RATIOS):
        correlation = np.exp(-decay * DISTANCES[np.ix_(seen, seen)]) + ratio * np.eye(len(seen))
        rest = scores[:, None, None] - means
        squares = np.einsum("iab,ij,jab->ab", rest, np.linalg.inv(correlation), rest)
        density = np.exp(-0.5 * (len(seen) * logs + squares / np.exp(logs) + np.linalg.slogdet(correlation)[1]))
        integrals.append(math.log(density.sum()))
    found = np.array([likelihood for likelihood, _ in assess(trials)])
    # Up to a constant, and to the ends of the grid over which the integral is a sum.
    np.testing.assert_allclose(found - found[0], np.array(integrals) - integrals[0], atol=0.05)


def test_draws_have_the_posteriors_mean_and_covariance() -> None:
    posterior = condition([OrderTrial(A, 3.0), OrderTrial(REVERSED, -1.0)], HALVING)
    rng = np.random.default_rng(0)
    draws = np.array([posterior.sample(rng)[[A, B]] for _ in range(4000)])
    np.testing.assert_allclose(draws.mean(axis=0), posterior.mean[[A, B]], atol=0.06)
    np.testing.assert_allclose(np.cov(draws.T), posterior.covariance[np.ix_([A, B], [A, B])], atol=0.06)


def test_equal_scores_are_no_error() -> None:
    posterior = fit([OrderTrial(A, -5.0), OrderTrial(C, -5.0), OrderTrial(A, -5.0)])
    np.testing.assert_allclose(posterior.mean, -5.0)
    assert np.isfinite(posterior.covariance).all()


def test_untried_orders_follow_their_neighbours_and_are_less_certain() -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal(len(PAIRS))
    truth = SIGNS @ weights
    seen = rng.permutation(120)[:40]
    posterior = fit([OrderTrial(int(order), float(truth[order])) for order in seen])
    unseen = np.setdiff1d(np.arange(120), seen)
    assert np.corrcoef(posterior.mean[unseen], truth[unseen])[0, 1] > 0.9
    assert posterior.deviation[unseen].min() > posterior.deviation[seen].max()
