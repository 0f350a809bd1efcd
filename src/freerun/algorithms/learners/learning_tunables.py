"""The settings of an algorithm that may change while a run goes on: by a callback, or by `--adapt`.

`--adapt` moves the minibatch size and the amount of learning per step. Both change what is learned, not only
how fast. So neither is changed unless the user has given a bound for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

from torch import Tensor

from freerun.core import Algorithm, AlgorithmTraits, Tunable, UserError, WarmStartable

MINIBATCH, UPDATE_RATIO, LEARNING_RATE = "minibatch", "update_ratio", "learning_rate"
LEARNING_TUNABLES = (MINIBATCH, UPDATE_RATIO)
"""The names of these tunables in adapting.jsonl and in the metrics."""


SMALLEST = 1e-12
"""The least that a callback may set where a number must be above 0."""


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


def changeable_settings(algorithm: Any, traits: AlgorithmTraits) -> list[Tunable]:
    """Return what a callback may change: it knows what it does, so there is no bound but that of sense."""
    settings = {MINIBATCH: traits.minibatch_setting, UPDATE_RATIO: traits.update_ratio_setting}
    tunables = []
    for name, setting in settings.items():
        if setting is not None:
            is_whole = isinstance(getattr(algorithm.config, setting), int)
            tunables.append(_tunable(algorithm, name, setting, 1.0 if is_whole else SMALLEST, math.inf))
    groups = _parameter_groups(algorithm)
    # A step that was captured in a CUDA graph reads its learning rate from a tensor, or never again.
    if groups and all(isinstance(group["lr"], Tensor) or not group["params"][0].is_cuda for group in groups):
        tunables.append(_learning_rate(algorithm))
    return tunables


def restore_settings(algorithm: Any, traits: AlgorithmTraits, changed: Mapping[str, float]) -> None:
    """Change the config again as a callback did before a checkpoint; names that are no settings of it are left alone.

    The optimisers are not touched: their learning rates are in the checkpoint, and may have been annealed since.
    """
    settings: dict[str, str | None] = {LEARNING_RATE: LEARNING_RATE}
    settings |= {MINIBATCH: traits.minibatch_setting, UPDATE_RATIO: traits.update_ratio_setting}
    known = {field.name for field in fields(algorithm.config)}
    values: dict[str, float] = {}
    for name, value in changed.items():
        setting = settings.get(name)
        if setting is not None and setting in known:
            is_whole = isinstance(getattr(algorithm.config, setting), int)
            values[setting] = int(value) if is_whole else float(value)
    if values:
        algorithm.reconfigure(replace(algorithm.config, **values))


def _parameter_groups(algorithm: Any) -> list[dict[str, Any]]:
    """Return the optimisers' groups. They are looked up every time: a checkpoint that is loaded replaces them."""
    optimizers = algorithm.optimizers().values() if isinstance(algorithm, WarmStartable) else ()
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _learning_rate(algorithm: Any) -> Tunable:
    def apply(wanted: float) -> None:
        for group in _parameter_groups(algorithm):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(wanted)
            else:
                group["lr"] = wanted
        # Where it is annealed, the configured one is what goes down.
        if LEARNING_RATE in {field.name for field in fields(algorithm.config)}:
            algorithm.reconfigure(replace(algorithm.config, **{LEARNING_RATE: wanted}))

    read = lambda: float(_parameter_groups(algorithm)[0]["lr"])  # noqa: E731
    return Tunable(LEARNING_RATE, read, apply, SMALLEST, math.inf, is_whole=False, between_updates=True)


def _tunable(algorithm: TunableAlgorithm, name: str, setting: str, low: float, high: float) -> Tunable:
    is_whole = isinstance(getattr(algorithm.config, setting), int)

    def apply(wanted: float) -> None:
        number = int(wanted) if is_whole else wanted
        algorithm.reconfigure(replace(algorithm.config, **{setting: number}))

    read = lambda: float(getattr(algorithm.config, setting))  # noqa: E731
    return Tunable(name, read, apply, low, high, is_whole, between_updates=True)
