"""From a checkpoint to the settings that go on with it: what may change on the way, and what must not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freerun.config import TrainConfig
from freerun.core import UserError
from freerun.persistence import checkpoint
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.secrecy import without_secrets
from freerun.registry import MODES, flatten_config, lookup, make_config, mode_name

MAY_CHANGE = (
    "total_steps",
    "total_episodes",
    "mode",
    "num_workers",
    "num_learners",
    "max_lag",
    "device",
    "learner_threads",
    "step_timeout",
    "max_failures",
    "on_nan",
    "eval_every",
    "eval_episodes",
    "checkpoint_every",
    "keep_checkpoints",
    "display",
    "quiet",
    "watch",
    "run_dir",
)
"""What a run may change when it is resumed, beside the settings of its mode; the rest would make it another run."""


def newest(run_dir: Path) -> Checkpoint:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} cannot be resumed: there is no such folder")
    return checkpoint.newest(run_dir)


def settings_of(found: Checkpoint, run_dir: Path, mode: str | None = None) -> dict[str, Any]:
    """The run's settings, as the start of those of its continuation in this mode."""
    options = found.state["config"]
    if not isinstance(options, dict) or not isinstance(options.get("mode"), str):
        raise UserError(f"{found.path} holds no settings")
    options = {**options, "run_dir": str(run_dir)}
    return options if mode is None else in_mode(options, mode)


def in_mode(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The same run in another mode: without what only the other one has a word for."""
    name = mode_name({"mode": mode})
    before, after = (lookup("mode", str(entry), MODES) for entry in (options["mode"], name))
    if name == options["mode"]:
        return dict(options)
    own = {field.name for field in dataclasses.fields(before.load_config())}
    kept = {key: value for key, value in options.items() if key not in own}
    if "sequential" in (name, options["mode"]) or not (before.whole_episodes and after.whole_episodes):
        kept["num_workers"] = None
    if after.takes_turns:
        kept["max_lag"] = 0
    elif after.never_waits:
        kept["max_lag"] = None
    return {**kept, "mode": name}


def check_changes(config: TrainConfig[Any, Any], found: Checkpoint) -> None:
    """Refuse what would make it another run."""
    before = flatten_config(make_config({**found.state["config"], "env": found.state["config"].get("env", "")}))
    own = {
        field.name
        for part in (config.collector, config.tracking, config.adapting)
        for field in dataclasses.fields(part)
    }
    kinds = [str(settings).partition(":")[0] for settings in (before["device"], config.device)]
    if kinds[0] != kinds[1]:
        raise UserError(f"--device cannot change from {kinds[0]} to {kinds[1]} when a run is resumed")
    for name, value in without_secrets(flatten_config(config)).items():
        if name not in MAY_CHANGE and name not in own and name in before and before[name] != value:
            raise UserError(
                f"--{name.replace('_', '-')} cannot change when a run is resumed (it was {before[name]!r}): "
                "leave it out, or start another run with --config"
            )
