"""What was left open in a run's settings, filled in: config.json then says everything."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import psutil

from freerun import learners
from freerun.adapting.options import AdaptConfig
from freerun.config import DEFAULT_TOTAL_STEPS, TrainConfig
from freerun.core import UserError
from freerun.envs.isaac_launch import is_isaac_task, resolve
from freerun.making import is_tensors
from freerun.registry import MODES, lookup

logger = logging.getLogger("freerun")

WORKERS_PER_CORE, MOST_WORKERS, WORKER_BYTES = 32, 256, 100_000_000
"""As far as --adapt goes if nobody says how far; and no further than there is memory for."""


def complete(config: TrainConfig[Any, Any]) -> TrainConfig[Any, Any]:
    """As the mode, the environment and the machine suggest."""
    changes: dict[str, Any] = {"num_learners": learners.num_learners(config)}
    if is_isaac_task(config.env):
        config = dataclasses.replace(config, env=resolve(config.env))
    if config.total_steps is None and config.total_episodes is None:
        changes["total_steps"] = DEFAULT_TOTAL_STEPS
    if is_tensors(config):
        changes["collector"] = _for_tensors(config.collector)
        changes["num_workers"] = changes["collector"].num_workers or 1
        if changes["num_learners"] > 1:
            raise UserError("environments that are tensors have one learner so far: leave --num-learners out")
    elif config.num_workers is None:
        one_per_core = max(learners.default_num_workers(), changes["num_learners"])
        changes["num_workers"] = 1 if config.mode == "sequential" else config.collector.num_workers or one_per_core
    if config.adapting.adapt:
        num_workers = changes.get("num_workers", config.num_workers) or 1
        changes["adapting"] = _adapting(config, num_workers, changes["num_learners"])
    if config.device == "auto":
        import torch

        changes["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    mode = lookup("mode", config.mode, MODES)
    takes_turns = mode.takes_turns or config.deterministic
    if config.deterministic and getattr(config.algorithm, "stages", None) == "concurrent":
        raise UserError("--deterministic takes the stages of MBPO in turn: leave --stages concurrent out")
    if config.max_lag is None and not mode.never_waits:
        changes["max_lag"] = 0 if takes_turns else getattr(config.algorithm, "default_max_lag", 0)
    if config.on_nan is None:
        changes["on_nan"] = "stop" if mode.whole_episodes else "continue"
    collector = changes.get("collector", config.collector)
    changes["algorithm"] = _suited(config.algorithm, collector.unit_steps, takes_turns)
    if changes["num_learners"] > 1:
        changes["algorithm"] = _for_several(changes["algorithm"], changes.get("device", config.device))
    return dataclasses.replace(config, **changes)


def check_adapting(config: TrainConfig[Any, Any]) -> None:
    """Refuse what --adapt cannot move."""
    bounds, mode = config.adapting, config.mode
    if not bounds.adapt:
        return
    able = [name for name, entry in MODES.items() if entry.adapts]
    if mode not in able or is_tensors(config):
        what = "environments that are tensors" if is_tensors(config) else f"--mode {mode}"
        raise UserError(f"--adapt finds nothing to move in {what}: leave it out, or choose one of {', '.join(able)}")
    if mode == "batch" and bounds.adapt_max_workers is not None:
        raise UserError("--mode batch has one collector, whatever --adapt does: leave --adapt-max-workers out")
    moved = {"adapt_max_queue_size": "max_queue_size"}
    if getattr(config.collector, "segment_steps", None) is None:
        moved["adapt_max_envs_per_worker"] = "envs_per_worker"
    for bound in ("adapt_max_queue_size", "adapt_max_envs_per_worker"):
        flag, most = f"--{bound.replace('_', '-')}", getattr(bounds, bound)
        start = getattr(config.collector, moved.get(bound, ""), None)
        if most is not None and start is None:
            raise UserError(f"{flag} bounds nothing that --adapt could move here, in --mode {mode}: leave it out")
        if most is not None and most < start:
            raise UserError(f"{flag} {most} is less than the {start} that the run starts with: raise it")


def _adapting(config: TrainConfig[Any, Any], num_workers: int, num_learners: int) -> AdaptConfig:
    """How far --adapt may go, with what was left open."""
    check_adapting(config)
    if num_learners > 1:
        raise UserError("--adapt tunes a run with one learner: leave --num-learners out")
    if config.mode == "batch":
        return config.adapting
    in_memory = psutil.virtual_memory().available // WORKER_BYTES
    derived = min(MOST_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1), in_memory)
    most = config.adapting.adapt_max_workers or max(num_workers, derived)
    if most < num_workers:
        raise UserError(f"--adapt-max-workers {most} is less than the {num_workers} that the run starts with: raise it")
    return dataclasses.replace(config.adapting, adapt_max_workers=most)


def _for_tensors(collector: Any) -> Any:
    """A mode's settings, with those that were left open and differ from other environments'."""
    suited = {"num_envs": 64, "num_steps_per_env": 24, "num_collectors": 1}
    fields = {field.name for field in dataclasses.fields(collector)}
    changes = {name: value for name, value in suited.items() if name in fields and getattr(collector, name) is None}
    return dataclasses.replace(collector, **changes)


def _suited(algorithm: Any, unit_steps: int | None, takes_turns: bool) -> Any:
    """The algorithm's settings, with those that were left to the mode."""
    changes: dict[str, Any] = {}
    counts_episodes = getattr(algorithm, "episodes_per_update", None) is not None
    if unit_steps is not None and getattr(algorithm, "steps_per_update", 0) is None and not counts_episodes:
        changes["steps_per_update"] = unit_steps
    if getattr(algorithm, "stages", None) == "auto":
        changes["stages"] = "in-turn" if takes_turns else "concurrent"
    return dataclasses.replace(algorithm, **changes)


def _for_several(algorithm: Any, device: str) -> Any:
    """The algorithm's settings, with those that several learners need."""
    changes = {}
    if getattr(algorithm, "acceleration", None) == "auto" and device.startswith("cuda"):
        changes["acceleration"] = "none"
        logger.warning("several learners do not record their gradient steps as CUDA graphs: one may be faster")
    if getattr(algorithm, "stages", None) == "concurrent":
        changes["stages"] = "in-turn"
        logger.warning("several learners take the stages of MBPO in turn (--stages in-turn)")
    return dataclasses.replace(algorithm, **changes)
