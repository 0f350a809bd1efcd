"""From a checkpoint to the settings of its continuation: what may change, what must not, and whether anything is
left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freerun.adapters.tensor_envs import find_builder
from freerun.core import ModeOptions, RunScale, UserError
from freerun.persistence import checkpoint
from freerun.persistence.checkpoint import Checkpoint
from freerun.persistence.redaction import without_secrets
from freerun.persistence.run_folder import CONFIG, RunFolder
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.registry import MODES, find_algorithm, find_mode, flatten_config, make_config, mode_name
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger

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
    "callback",
    "checkpoint_every",
    "keep_checkpoints",
    "display",
    "quiet",
    "watch",
    "run_dir",
)
"""What may change when a run is resumed, besides the settings of its mode. A change of the rest would make it another
run."""


def newest(run_dir: Path) -> Checkpoint:
    """Return the newest whole checkpoint of a run."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} cannot be resumed: there is no such folder")
    return checkpoint.newest(run_dir)


def settings_of(found: Checkpoint, run_dir: Path, mode: str | None = None) -> dict[str, Any]:
    """Return the settings of a run, for its continuation in this mode or in its own."""
    kept = found.state["config"]
    if not isinstance(kept, dict) or not isinstance(kept.get("mode"), str):
        raise UserError(f"{found.path} holds no settings")
    options: dict[str, Any] = {**kept, "run_dir": str(run_dir)}
    if mode is not None:
        options = in_mode(options, mode)
    # Left open, the number of workers follows from the settings of the mode again.
    if _derives_workers(options):
        options["num_workers"] = None
    return options


def _derives_workers(options: Mapping[str, Any]) -> bool:
    """True if the number of workers follows from settings of the mode that may change, such as --num-collectors."""
    entry = MODES.get(options["mode"])  # the user's own modes are not imported here: the folder is not trusted yet
    if entry is None:
        return False
    steps_tensors = entry.traits.tensors is not None and find_builder(options.get("env")) is not None
    return steps_tensors or entry.load_config().num_workers is not ModeOptions.num_workers


def in_mode(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the settings of the same run in another mode, without those that only the old mode has."""
    name = mode_name({"mode": mode})
    before, after = (find_mode(str(mode)).traits for mode in (options["mode"], name))
    if name == options["mode"]:
        return dict(options)
    own = {field.name for field in dataclasses.fields(before.options)}
    kept = {key: value for key, value in options.items() if key not in own}
    if None in (before.workers_flag, after.workers_flag) or not (before.whole_episodes and after.whole_episodes):
        # The number of workers means something else in the other mode, so it is derived anew.
        kept["num_workers"] = None
    if after.takes_turns:
        kept["max_lag"] = 0
    elif after.never_waits:
        kept["max_lag"] = None
    return {**kept, "mode": name}


def check_changes(config: AnyConfig, found: Checkpoint) -> None:
    """Refuse changes that would make it another run."""
    # Defaults are filled in, so that a setting that the old version did not have counts as unchanged.
    old = make_config({**found.state["config"], "env": found.state["config"].get("env", "")})
    before, fill_in = flatten_config(old), find_algorithm(old.algo).traits.scaled_defaults
    # What an older version left open follows from the size of the run, as in a new run.
    left_open = fill_in(old.algorithm, RunScale()) if fill_in is not None else {}
    own = {
        field.name
        for part in (config.collector, config.tracking, config.adapting)
        for field in dataclasses.fields(part)
    }
    # cuda:0 and cuda:1 are the same kind. A CPU and a GPU round differently, and have other generators.
    kinds = [str(settings).partition(":")[0] for settings in (before["device"], config.device)]
    if kinds[0] != kinds[1]:
        raise UserError(f"--device cannot change from {kinds[0]} to {kinds[1]} when a run is resumed")
    for name, value in without_secrets(flatten_config(config)).items():
        may_change = name in MAY_CHANGE or name in own or name in left_open
        if not may_change and name in before and before[name] != value:
            raise UserError(
                f"--{name.replace('_', '-')} cannot change when a run is resumed (it was {before[name]!r}): "
                "leave it out, or start a new run from this one's policy with --config and --init-from (docs/resume.md)"
            )


def nothing_left(config: AnyConfig, found: Checkpoint) -> str | None:
    """Return a sentence about a run that has reached its limits and how to continue; None if something is left to
    do."""
    config = complete(config)
    check_changes(config, found)
    ledger, run_dir = Ledger(), found.path.parent.parent
    try:
        ledger.load_state_dict(found.state["ledger"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # `experiment.run` says what is wrong with it
    if Budget(config.total_steps, config.total_episodes).progress(ledger) < 1.0:
        return None
    # A run that was killed after its last checkpoint has not written its results yet: `experiment.run` does so.
    if not RunFolder(run_dir).has_results_of(ledger.version):
        return None
    episodes = ledger.episodes + ledger.num_broken
    counts = (("steps", ledger.steps, config.total_steps), ("episodes", episodes, config.total_episodes))
    name, done, limit = next(count for count in counts if count[2] is not None and count[1] >= count[2])
    return (
        f"Nothing is left to do: the run in {run_dir} has made {done:,} of {limit:,} {name}. To go on with it, raise "
        f"--total-{name}; to start a new run from its policy, with other settings: "
        f"freerun train --config {run_dir / CONFIG} --init-from {run_dir}"
    )
