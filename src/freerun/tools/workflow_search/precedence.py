"""Orders of the host groups as ten signs, one for each pair of groups: which of the two comes first.

The number of pairs on which two orders disagree is their Kendall distance. The squared Euclidean distance of their
signs is four times that, so an RBF kernel on the signs is the Mallows kernel exp(-decay * Kendall distance).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freerun_envs.workflow import GROUPS

ScoreArray = NDArray[np.float64]
"""Numbers in double precision: a kernel matrix in single precision may not be positive definite."""
ORDERS: tuple[str, ...] = tuple(",".join(order) for order in itertools.permutations(GROUPS))
"""All 120 orders, as the flag --workflow takes them. An order is known by its place here."""
PAIRS: tuple[tuple[str, str], ...] = tuple(itertools.combinations(GROUPS, 2))
"""The ten pairs of groups, in the order of the signs."""


def precedence_signs(orders: Sequence[str]) -> ScoreArray:
    """Return an array [orders, pairs]: 1 where the first group of a pair precedes the second one, else -1."""
    places = [{group: place for place, group in enumerate(order.split(","))} for order in orders]
    return np.array([[1.0 if place[a] < place[b] else -1.0 for a, b in PAIRS] for place in places])


def kendall_distances(signs: ScoreArray) -> ScoreArray:
    """Return the number of pairs on which each two orders disagree, from their signs."""
    # An equal sign adds 1 to the product and an unequal one -1: product = pairs - 2 * disagreements.
    distances: ScoreArray = (signs.shape[1] - signs @ signs.T) / 2
    return distances


SIGNS = precedence_signs(ORDERS)
DISTANCES = kendall_distances(SIGNS)
