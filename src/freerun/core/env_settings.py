"""Settings that an environment declares for itself, and series of trainings that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium

from freerun.core.data import Metrics
from freerun.core.seeds import RunSeed

EnvTarget = str | Callable[..., gymnasium.Env[Any, Any]]
"""What an environment is made by: its Gymnasium id, `module:callable`, or a callable."""
Baseline = Callable[[gymnasium.Env[Any, Any], RunSeed, int], list[float]]
"""A policy that learns nothing: it plays a number of episodes of a seed and returns their returns."""


@dataclass(frozen=True)
class EnvSettings:
    """Settings of one environment. The fields of a subclass become flags and keys of config.json for it alone.

    The catalog names the subclass of each environment that has one. This base class serves all other environments.
    """

    series_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that list the trainings of a series. The first one takes their names; messages call them by it."""
    trial_columns: ClassVar[Mapping[str, str]] = {"trial_return": "{:.1f}"}
    """The figures of `trial_figures`, and how the table of a series writes each of them."""

    def recipe(self, env: EnvTarget, env_args: Mapping[str, Any]) -> tuple[EnvTarget, dict[str, Any]]:
        """Return what builds the environment, and all of its arguments."""
        return env, dict(env_args)

    def series(self) -> Mapping[str, EnvSettings]:
        """Return the settings of each training by its name, where several trainings follow each other."""
        return {}

    def trial_figures(self, env: gymnasium.Env[Any, Any], episode_return: float) -> Metrics:
        """Judge the episode that was just played on `env`, for the table of a series."""
        return {"trial_return": episode_return}

    def baselines(self) -> Mapping[str, Baseline]:
        """Return the policies that `freerun eval --compare` plays beside the trained one."""
        return {}
