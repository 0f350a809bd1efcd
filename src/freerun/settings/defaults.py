"""Fills in what was left open in a run's settings, so that config.json says everything."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import psutil

from freerun.adapters.isaac_launch import is_isaac_task, resolve
from freerun.core import AlgorithmTraits, RunScale, UserError
from freerun.settings.config import DEFAULT_TOTAL_STEPS, AdaptConfig, AnyConfig
from freerun.settings.factories import episodes_per_update, is_tensors, resizable_settings
from freerun.settings.registry import MODES, find_algorithm, find_mode
from freerun.transport import learner_place

logger = logging.getLogger("freerun")

SEGMENT_MAX_LAG = 3
"""--max-lag where segments were chosen. The workers are at most two updates ahead, and a slow one has another update's
time to finish its segment before the learner waits for it."""
SEGMENT_UPDATES = 2
"""A segment of every environment together is as long as this many updates. Longer segments are better, because less of
an advantage rests on the value function; but they must be finished within the lag."""
LONGEST_SEGMENT = 512
"""Whole episodes are handed over where segments would be longer than this."""
WORKERS_PER_CORE, MOST_WORKERS, WORKER_BYTES = 32, 256, 100_000_000
"""How far --adapt goes if no bound is given; the last is the memory of one worker, so that all of them fit."""


def complete(config: AnyConfig) -> AnyConfig:
    """Fill in what the mode, the algorithm, the environment and the machine suggest."""
    mode, algorithm = find_mode(config.mode).traits, find_algorithm(config.algo).traits
    changes: dict[str, Any] = {"num_learners": num_learners(config)}
    if is_isaac_task(config.env):
        config = dataclasses.replace(config, env=resolve(config.env))
    if config.total_steps is None and config.total_episodes is None:
        changes["total_steps"] = DEFAULT_TOTAL_STEPS
    if is_tensors(config):
        assert mode.tensors is not None
        changes["collector"] = _filled_in(config.collector, mode.tensors.defaults)
        changes["num_workers"] = changes["collector"].num_workers or 1
        if config.num_workers not in (None, changes["num_workers"]):
            raise UserError(
                f"--num-workers is not for environments that are tensors, which --mode {config.mode} steps as one "
                "batch: give --num-envs instead"
            )
    elif config.num_workers is None:
        one_per_core = max(default_num_workers(), changes["num_learners"])
        changes["num_workers"] = 1 if mode.workers_flag is None else config.collector.num_workers or one_per_core
    if config.adapting.adapt:
        num_workers = changes.get("num_workers", config.num_workers) or 1
        changes["adapting"] = _adapting(config, num_workers, changes["num_learners"])
    if config.device == "auto":
        import torch

        changes["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    # With lag, the clock would decide which weights choose an action.
    takes_turns = mode.takes_turns or config.deterministic
    if config.deterministic and algorithm.has_stages and config.algorithm.stages == "concurrent":
        raise UserError(
            f"--deterministic takes the stages of --algo {config.algo} in turn: leave --stages concurrent out"
        )
    # A mode that never waits cannot keep to a bound, so there it stays open.
    if config.max_lag is None and not mode.never_waits:
        changes["max_lag"] = 0 if takes_turns else algorithm.default_max_lag
    if config.on_nan is None:
        changes["on_nan"] = "stop" if mode.whole_episodes else "continue"
    changes["algorithm"] = _suited(config, algorithm, _scale(config, changes), takes_turns)
    has_segments = any(field.name == "segment_steps" for field in dataclasses.fields(config.collector))
    if has_segments and config.collector.segment_steps is None:
        max_lag = SEGMENT_MAX_LAG if config.max_lag is None else config.max_lag
        segment_steps = _segment_steps(config, changes, algorithm, max_lag)
        changes["collector"] = dataclasses.replace(config.collector, segment_steps=segment_steps)
        if segment_steps:
            changes["max_lag"] = max_lag
    if changes["num_learners"] > 1:
        changes["algorithm"] = _for_several(changes["algorithm"], algorithm, changes.get("device", config.device))
    return dataclasses.replace(config, **changes)


def num_learners(config: AnyConfig) -> int:
    """Return the number of learners: as configured, or as many as torchrun has started."""
    place = learner_place.current()
    if place is None:
        return config.num_learners
    if config.num_learners not in (1, place.count):
        raise UserError(f"torchrun has started {place.count} learners: leave --num-learners {config.num_learners} out")
    return place.count


def default_num_workers() -> int:
    """Return the number of workers if none is given: one per core, over all machines."""
    place, num_cores = learner_place.current(), os.cpu_count() or 1
    # place.count / place.local_count is the number of machines, if all of them have as many learners as this one.
    return num_cores if place is None else max(place.count, num_cores * place.count // place.local_count)


def check_adapting(config: AnyConfig) -> None:
    """Refuse what --adapt cannot move."""
    bounds, mode, resizable = config.adapting, config.mode, resizable_settings(config.env, config.mode)
    if not bounds.adapt:
        return
    if not resizable:
        with_tensors = " with environments that are tensors" if is_tensors(config) else ""
        what = f"--mode {mode}{with_tensors}"
        able = [name for name in MODES if resizable_settings(config.env, name)]
        raise UserError(f"--adapt finds nothing to move in {what}: leave it out, or choose one of {', '.join(able)}")
    if "num_workers" not in resizable and bounds.adapt_max_workers is not None:
        raise UserError(
            f"--mode {mode} keeps its number of workers, whatever --adapt does: leave --adapt-max-workers out"
        )
    for flag, most, setting in (
        ("--adapt-max-queue-size", bounds.adapt_max_queue_size, "max_queue_size"),
        ("--adapt-max-envs-per-worker", bounds.adapt_max_envs_per_worker, "envs_per_worker"),
    ):
        if most is None:
            continue
        # The slots of segments are made for a fixed number of environments.
        is_fixed = setting == "envs_per_worker" and bool(config.collector.segment_steps)
        if setting not in resizable or is_fixed:
            raise UserError(f"{flag} bounds nothing that --adapt could move here, in --mode {mode}: leave it out")
        start = getattr(config.collector, setting)
        if most < start:
            raise UserError(f"{flag} {most} is less than the {start} that the run starts with: raise it")


def _adapting(config: AnyConfig, num_workers: int, num_learners: int) -> AdaptConfig:
    """Return the bounds of --adapt, with those filled in that were left open."""
    check_adapting(config)
    if num_learners > 1:
        raise UserError("--adapt tunes a run with one learner: leave --num-learners out")
    if "num_workers" not in resizable_settings(config.env, config.mode):
        return config.adapting
    in_memory = psutil.virtual_memory().available // WORKER_BYTES
    derived = min(MOST_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1), in_memory)
    most = config.adapting.adapt_max_workers or max(num_workers, derived)
    if most < num_workers:
        raise UserError(f"--adapt-max-workers {most} is less than the {num_workers} that the run starts with: raise it")
    return dataclasses.replace(config.adapting, adapt_max_workers=most)


def _filled_in(collector: Any, defaults: Mapping[str, int]) -> Any:
    """Return a mode's settings, with these values where they were left open."""
    return dataclasses.replace(
        collector, **{name: value for name, value in defaults.items() if getattr(collector, name) is None}
    )


def _scale(config: AnyConfig, changes: Mapping[str, Any]) -> RunScale:
    """Return how large the run is, with what was filled in so far."""
    collector: Any = changes.get("collector", config.collector)
    if config.deterministic:
        # The same seed gives the same weights with any number of workers, so nothing may depend on that number.
        return RunScale(unit_steps=collector.unit_steps)
    num_envs = collector.envs_at_once(changes.get("num_workers", config.num_workers))
    if not is_tensors(config):
        return RunScale(num_envs, collector.unit_steps)
    # Every learner has simulators of its own, with --num-envs each.
    num_learners = changes["num_learners"]
    return RunScale(num_envs * num_learners, collector.unit_steps * num_learners, is_tensors=True)


def _segment_steps(config: AnyConfig, changes: Mapping[str, Any], algorithm: AlgorithmTraits, max_lag: int) -> int:
    """Return the length of segments where they keep more workers busy than whole episodes; 0 for whole episodes.

    Whoever starts an episode must finish it within the lag that is allowed. So of n environments, only those are busy
    whose episodes fit into the updates ahead. A segment of each environment fits if it is short enough.
    """
    wants_steps = algorithm.on_policy and algorithm.counts_steps and episodes_per_update(config) is None
    # --adapt moves the number of environments, and the trainings of a series share workers that play whole episodes.
    is_fixed = not (config.deterministic or config.adapting.adapt or config.env_settings.series())
    scale = _scale(config, changes)
    if not (wants_steps and is_fixed) or scale.has_few_envs:
        return 0
    # n environments are busy all the time if n * segment <= steps of the updates that may be collected ahead.
    updates_ahead = min(SEGMENT_UPDATES, max(1, max_lag))
    segment_steps = updates_ahead * changes["algorithm"].steps_per_update // scale.num_envs
    return max(1, segment_steps) if segment_steps <= LONGEST_SEGMENT else 0


def _suited(config: AnyConfig, traits: AlgorithmTraits, scale: RunScale, takes_turns: bool) -> Any:
    """Return the algorithm's settings, with those filled in that were left to the mode and to the size of the run."""
    algorithm = config.algorithm
    changes: dict[str, Any] = {}
    is_open = traits.counts_steps and algorithm.steps_per_update is None and episodes_per_update(config) is None
    if scale.unit_steps is not None and is_open:
        changes["steps_per_update"] = scale.unit_steps
    if traits.scaled_defaults is not None:
        changes |= traits.scaled_defaults(algorithm, scale)
    if traits.has_stages and algorithm.stages == "auto":
        changes["stages"] = "in-turn" if takes_turns else "concurrent"
    return dataclasses.replace(algorithm, **changes)


def _for_several(algorithm: Any, traits: AlgorithmTraits, device: str) -> Any:
    """Return the algorithm's settings, changed where several learners cannot do what one can."""
    changes = {}
    if traits.has_acceleration and algorithm.acceleration == "auto" and device.startswith("cuda"):
        changes["acceleration"] = "none"
        logger.warning("several learners do not record their gradient steps as CUDA graphs: one may be faster")
    if traits.has_stages and algorithm.stages == "concurrent":
        changes["stages"] = "in-turn"
        logger.warning("several learners take the stages of the algorithm in turn (--stages in-turn)")
    return dataclasses.replace(algorithm, **changes)
