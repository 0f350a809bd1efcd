"""Observations that come again are looked up; where they do not, nothing is kept for them."""

from __future__ import annotations

import numpy as np

from freerun.algorithms import recall
from freerun.algorithms.recall import Recall
from freerun.core import Array, FloatArray


class Doubling:
    """A forward pass that counts how often it was made."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, obs: Array, output: FloatArray) -> int:
        self.num_calls += 1
        output[...] = 2 * obs
        return self.num_calls


def ask(known: Recall, number: float) -> tuple[float, int]:
    output = np.zeros(1, np.float32)
    prepared = known(np.array([number], np.float32), output)
    return float(output[0]), prepared


def test_computes_once_until_it_forgets() -> None:
    forward = Doubling()
    known = Recall(forward)
    assert [ask(known, number) for number in (3, 4, 3, 3)] == [(6, 1), (8, 2), (6, 1), (6, 1)]
    known.forget()
    assert ask(known, 3) == (6, 3)


def test_what_it_has_put_out_may_be_overwritten() -> None:
    known, output = Recall(Doubling()), np.zeros(1, np.float32)
    known(np.ones(1, np.float32), output)
    output[...] = 7
    assert ask(known, 1) == (2, 1)


def test_is_of_no_use_where_observations_do_not_come_again() -> None:
    known = Recall(Doubling())
    for number in range(recall.ENOUGH - 1):
        ask(known, number)
    known.forget()
    assert known.is_useful  # it has not seen enough
    ask(known, -1)
    known.forget()
    assert not known.is_useful


def test_is_of_use_where_more_than_half_have_come_before() -> None:
    known = Recall(Doubling())
    for number in range(recall.ENOUGH):
        for _ in range(3):
            ask(known, number)
    known.forget()
    assert known.is_useful


def test_keeps_no_more_than_its_share_of_memory() -> None:
    forward = Doubling()
    known = Recall(forward)
    many = recall.MOST_BYTES // 8 + 100  # four bytes each of observation and output
    for number in range(many):
        ask(known, number)
    assert forward.num_calls == many
    ask(known, 0)
    assert forward.num_calls == many
    ask(known, many - 1)  # had no room
    assert forward.num_calls == many + 1
