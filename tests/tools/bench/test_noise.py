"""What counts as a difference, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from freerun.tools.bench.noise import Range, noise_word, relative_spread


def test_spread_is_from_lowest_to_highest_by_the_median() -> None:
    assert relative_spread([90, 110, 100]) == pytest.approx(0.2)
    assert relative_spread([100]) is None


def test_a_range_is_that_of_the_runs_but_no_narrower_than_the_noise() -> None:
    assert astuple(Range.of([90, 100, 110], noise=0.1)) == pytest.approx((90, 100, 110))
    # 100 ± half of 10 %, though the runs themselves were closer.
    assert astuple(Range.of([99, 100, 101], noise=0.1)) == pytest.approx((95, 100, 105))


def test_a_single_run_is_off_by_ten_percent_for_all_one_knows() -> None:
    assert astuple(Range.of([100], noise=0.02)) == pytest.approx((95, 100, 105))
    assert astuple(Range.of([100], noise=0.3)) == pytest.approx((85, 100, 115))
    assert astuple(Range.of([99, 101], noise=None)) == pytest.approx((95, 100, 105))


def test_a_difference_is_called_only_where_ranges_lie_apart() -> None:
    fast, slow = [90.0, 100.0, 110.0], [80.0, 85.0]
    # slow: 82.5 ± 5 % reaches up to 86.6, below 90.
    assert Range.of(fast, 0.1).is_above(Range.of(slow, 0.1))
    # At twice the noise: 82.5 ± 10 % reaches up to 90.75, into the other's runs.
    assert not Range.of(fast, 0.2).is_above(Range.of(slow, 0.2))
    assert not Range.of(slow, 0.2).is_above(Range.of(fast, 0.2))


@pytest.mark.parametrize(
    ("spread_of_limit", "others", "word"),
    [(0.02, 0.01, "quiet"), (0.02, 0.1, "noisy"), (0.12, 0.0, "noisy"), (0.3, 0.0, "very noisy"), (None, 0.0, "noisy")],
)
def test_the_machine_is_as_noisy_as_its_worst_sign(spread_of_limit: float | None, others: float, word: str) -> None:
    assert noise_word(spread_of_limit, others) == word
