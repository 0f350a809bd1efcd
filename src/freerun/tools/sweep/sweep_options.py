"""What a sweep does, besides what each of its trainings does: the flags of `freerun sweep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from freerun.core import UserError, require_positive

DEFAULT_TRIALS = 20


@dataclass(frozen=True)
class SweepOptions:
    """How settings are chosen and judged."""

    trials: int | None = None
    """How many trials to train: 20 if not given, and all combinations with --sampler grid. A resumed sweep may be given
    more."""
    sampler: Literal["tpe", "random", "grid", "halving"] = "tpe"
    """Who chooses settings: tpe learns from earlier trials where good ones lie, random does not, grid tries every
    combination of listed values, halving is random and lets only the better third of the trials go on at each rung."""
    seeds_per_trial: int = 1
    """Train each trial with this many seeds, from --seed on. Its score is their mean."""
    at_once: int = 1
    """Train this many trials at the same time, each in a process of its own. Without --num-workers they share the
    cores."""
    score: Literal["return", "evaluation"] = "return"
    """What a trial is judged by: the mean return of the last 100 episodes of its training, or that of fresh episodes
    with its most likely actions, which are the same for all trials."""
    score_episodes: int = 20
    """Episodes of each such evaluation."""
    cost: Literal["seconds"] | None = None
    """Search for high scores and for few seconds of training at once: the result is a Pareto front. No trial is pruned
    then."""
    prune: bool = True
    """End a trial that is worse than the median of the others was at the same tenth of the training. --sampler halving
    has a rule of its own."""

    def __post_init__(self) -> None:
        from freerun.settings.registry import check_kinds  # here, because `freerun --help` needs none of it

        # What comes from a file or from Python has not been through the flags' parser.
        kinds = get_type_hints(SweepOptions)
        check_kinds({name: getattr(self, name) for name in kinds}, kinds)
        require_positive(self, "trials", "seeds_per_trial", "at_once", "score_episodes")
        if self.sampler == "halving" and (self.cost or not self.prune):
            other = "--cost, under which no trial is pruned" if self.cost else "--no-prune"
            raise UserError(f"--sampler halving prunes trials, which contradicts {other}: choose another --sampler")

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> SweepOptions:
        """Read the options of a sweep that is resumed, from a file that may come from anywhere."""
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            options = cls(**{name: value for name, value in content.items() if name in known})
        except TypeError as error:
            raise UserError(f"the options of the sweep cannot be read: {error}") from None
        return options
