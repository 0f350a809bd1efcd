"""Curves of bounded size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freerun.tools.watch.curves import Curves


def curves(values: list[float | None], most_points: int = 4) -> Curves:
    made = Curves(most_points)
    for step, value in enumerate(values, start=1):
        made.add_line(json.dumps({"step": step, "a": value}))
    return made


def test_few_points_are_kept_as_they_are() -> None:
    assert curves([1.0, None, 3.0]).columns() == {"step": [1, 2, 3], "a": [1.0, None, 3.0]}


def test_neighbours_become_one_when_there_are_too_many() -> None:
    columns = curves([float(value) for value in range(9)]).columns()
    assert columns["a"] == [0.5, 2.5, 4.5, 6.5]
    assert columns["step"] == [1.5, 3.5, 5.5, 7.5]


def test_a_metric_may_come_later() -> None:
    made = curves([1.0])
    made.add_line(json.dumps({"step": 2, "b": 5.0}))
    assert made.columns() == {"step": [1, 2], "a": [1.0, None], "b": [None, 5.0]}


def test_lags_are_counted_in_steps() -> None:
    made = Curves()
    made.add_line(json.dumps({"step": 100, "lag_share/0": 1.0}))
    made.add_line(json.dumps({"step": 300, "lag_share/0": 0.25, "lag_share/1": 0.75}))
    assert made.lag_steps == {0: 150.0, 1: 150.0}
    assert made.names == ["step"]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=200), st.integers(1, 10))
def test_however_many_come_the_size_is_bounded_and_the_mean_kept(values: list[float], most_points: int) -> None:
    made = curves(list(values), most_points)
    columns = made.columns(most_points=1000)
    assert len(columns["a"]) <= 2 * most_points
    whole = len(values) // made.updates_per_point * made.updates_per_point
    shown = [value for value in columns["a"] if value is not None]
    assert sum(shown) / len(shown) == pytest.approx(sum(values[:whole]) / whole, abs=1e-3)
