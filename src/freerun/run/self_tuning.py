"""`--adapt` put together: which settings of the run it may change, how far, and the rules that change them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from freerun.core import Tunable, TunableCollector, TuningBounds
from freerun.run.run_parts import RunParts
from freerun.settings.config import AnyConfig
from freerun.settings.factories import resizable_settings
from freerun.settings.registry import find_algorithm
from freerun.telemetry.machine_load import MachineLoad
from freerun.tuning.live_tuner import FILE_NAME, LiveTuner
from freerun.tuning.rules import Circumstances

DEFAULT_MOST_ENVS_PER_WORKER = 8
"""The bound of --adapt-max-envs-per-worker, if it is not given."""


def tuning_bounds(config: AnyConfig) -> TuningBounds | None:
    """Return the bounds within which --adapt may change the mode while it runs; None without --adapt."""
    given = config.adapting
    if not given.adapt:
        return None
    can_grow = "num_workers" in resizable_settings(config.env, config.mode)
    return TuningBounds(
        given.adapt_max_workers or 1 if can_grow else 1,
        given.adapt_max_envs_per_worker or DEFAULT_MOST_ENVS_PER_WORKER,
        given.adapt_max_queue_size,
    )


def find_tunables(parts: RunParts, adapted: Mapping[str, float]) -> list[Tunable]:
    """Return what --adapt may change. A run that was adapted before continues with the values that it had."""
    from freerun.algorithms.learners.learning_tunables import learning_tunables

    bounds, traits = parts.config.adapting, find_algorithm(parts.config.algo).traits
    learning = learning_tunables(parts.algorithm, traits, bounds.adapt_max_minibatch, bounds.adapt_min_update_ratio)
    tunables = [*cast(TunableCollector, parts.collector).tunables(), *learning]
    for tunable in tunables:
        if tunable.name in adapted:
            # The bounds may be tighter than in the run before.
            tunable.apply(min(tunable.high, max(tunable.low, adapted[tunable.name])))
    return tunables


def make_live_tuner(parts: RunParts, tunables: list[Tunable], machine: MachineLoad, run_dir: Path) -> LiveTuner:
    """Make what measures the run and changes the tunables from now on."""
    config = parts.config
    default_max_lag = find_algorithm(config.algo).traits.default_max_lag if config.max_lag is None else None
    return LiveTuner(
        tunables,
        Circumstances(os.cpu_count() or 1, default_max_lag),
        config.adapting.adapt_window,
        parts.collector.counts,
        parts.tracks,
        len(parts.tracks.workers),
        lambda: machine.read(0).get("cpu_percent", 0.0),
        run_dir / FILE_NAME,
    )
