"""Moments of several sites, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np

from freerun.algorithms.policies.running_moments import RunningMoments
from freerun.tools.federation.moment_merging import make_moments, merge_by_count, merge_by_median, new_rows

NOTHING = RunningMoments()


def values(moments: RunningMoments) -> tuple[float, float, float]:
    return moments.count, float(moments.mean), float(moments.variance)


def test_moments_are_merged_by_count() -> None:
    # Rows 1, 3 (mean 2, variance 1) and 5, 5, 8 (mean 6, variance 2): together 1, 3, 5, 5, 8 have the mean 22 / 5 = 4.4
    # and the variance (11.56 + 1.96 + 0.36 + 0.36 + 12.96) / 5 = 5.44.
    merged = merge_by_count(NOTHING, [make_moments(2, 2.0, 1.0), make_moments(3, 6.0, 2.0)])
    np.testing.assert_allclose(values(merged), (5, 4.4, 5.44))


def test_rows_that_all_sites_began_with_are_counted_once() -> None:
    # All began with the rows 1, 3. One has added 5, 5, 8, the other 2: together 1, 2, 3, 5, 5, 8 have the mean 4 and
    # the variance (9 + 4 + 1 + 1 + 1 + 16) / 6 = 32 / 6.
    base = make_moments(2, 2.0, 1.0)
    first = make_moments(5, 4.4, 5.44)
    second = make_moments(3, 2.0, 2 / 3)
    np.testing.assert_allclose(values(merge_by_count(base, [first, second])), (6, 4.0, 32 / 6))
    np.testing.assert_allclose(values(merge_by_count(base, [second, first])), (6, 4.0, 32 / 6))


def test_new_rows_are_what_a_merge_has_added() -> None:
    np.testing.assert_allclose(values(new_rows(make_moments(2, 2.0, 1.0), make_moments(5, 4.4, 5.44))), (3, 6.0, 2.0))
    assert new_rows(make_moments(2, 2.0, 1.0), make_moments(2, 2.0, 1.0)).count == 0


def test_the_moments_of_a_single_site_come_back_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    base, site = (make_moments(count, rng.random(3), rng.random(3)) for count in (700, 901))
    for merge in (merge_by_count, merge_by_median):
        merged = merge(base, [site])
        assert merged.count == 901
        np.testing.assert_array_equal(merged.mean, site.mean)
        np.testing.assert_array_equal(merged.variance, site.variance)
    assert merge_by_count(base, []) is base


def test_a_minority_cannot_move_the_median() -> None:
    sites = [make_moments(110, 1.0, 4.0), make_moments(120, 2.0, 5.0), make_moments(1e30, 1e9, 0.0)]
    merged = merge_by_median(make_moments(100, 0.0, 1.0), sites)
    assert values(merged) == (100 + 3 * 20, 2.0, 4.0)
