"""The settings of an algorithm that `--adapt` may change: the minibatch size and the amount of learning per step.

Both change what is learned, not only how fast. So neither is changed unless the user has given a bound for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from freerun.core import Algorithm, AlgorithmTraits, Tunable, UserError

MINIBATCH, UPDATE_RATIO = "minibatch", "update_ratio"
LEARNING_TUNABLES = (MINIBATCH, UPDATE_RATIO)
"""The names of these tunables in adapting.jsonl and in the metrics."""


class TunableAlgorithm(Algorithm, Protocol):
    """An algorithm whose traits name settings that may change between two updates."""

    config: Any

    def reconfigure(self, config: Any) -> None:
        """Go on with another config, which differs only in those settings."""
        ...


def learning_tunables(
    algorithm: Any, traits: AlgorithmTraits, max_minibatch: int | None, min_update_ratio: float | None
) -> list[Tunable]:
    """Return the tunables for which the user has given a bound."""
    minibatch, ratio = traits.minibatch_setting, traits.update_ratio_setting
    name = type(algorithm).__name__
    tunables = []
    if max_minibatch is not None:
        if minibatch is None:
            raise UserError(f"--adapt cannot move {name}'s minibatches while it runs: leave --adapt-max-minibatch out")
        start = getattr(algorithm.config, minibatch)
        if max_minibatch < start:
            raise UserError(
                f"--adapt-max-minibatch {max_minibatch} is less than the {start} that the run starts with: raise it"
            )
        tunables.append(_tunable(algorithm, MINIBATCH, minibatch, start, max_minibatch))
    if min_update_ratio is not None:
        if ratio is None:
            raise UserError(f"--adapt cannot move {name}'s ratio of updates: leave --adapt-min-update-ratio out")
        start = getattr(algorithm.config, ratio)
        if min_update_ratio > start:
            raise UserError(
                f"--adapt-min-update-ratio {min_update_ratio:g} is more than the {start:g} that the run starts with"
            )
        tunables.append(_tunable(algorithm, UPDATE_RATIO, ratio, min_update_ratio, start))
    return tunables


def _tunable(algorithm: TunableAlgorithm, name: str, setting: str, low: float, high: float) -> Tunable:
    is_whole = isinstance(getattr(algorithm.config, setting), int)

    def apply(wanted: float) -> None:
        number = int(wanted) if is_whole else wanted
        algorithm.reconfigure(replace(algorithm.config, **{setting: number}))

    read = lambda: float(getattr(algorithm.config, setting))  # noqa: E731
    return Tunable(name, read, apply, low, high, is_whole, between_updates=True)
