"""Converts checkpoints of older versions to the form that this version writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def upgrade_algorithm_state(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an algorithm in the present form, whatever version has written it."""
    state = dict(algorithm)
    if "return_moments" in state and "reward_scale" not in state:
        # PPO once saved only the statistics of the discounted returns, and not the returns of unfinished episodes.
        state["reward_scale"] = {"moments": state.pop("return_moments"), "of_episodes": {}, "of_simulators": {}}
    return state
