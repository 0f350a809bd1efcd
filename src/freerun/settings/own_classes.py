"""Modes, algorithms, trackers and callbacks of the user's own: what such a class must have, and its traits."""

from __future__ import annotations

import dataclasses
from typing import Any

from freerun.core import (
    AlgorithmTraits,
    HandedOver,
    ModeOptions,
    ModeTraits,
    Pacing,
    TrackerTraits,
    UserError,
    callable_name,
    import_callable,
)

REQUIRED = {
    "algorithm": ("Config", "demand", "observe", "update", "state_dict", "load_state_dict"),
    "mode": ("publish", "collect", "counts", "close"),
    "tracker": ("write", "close"),
    "callback": ("on_update",),
}
"""What a class must have, beside its constructor."""
GUIDES = {
    "algorithm": "docs/own_algorithm.md",
    "mode": "docs/own_mode.md",
    "tracker": "docs/watching.md",
    "callback": "docs/callbacks.md",
}


def name_own(kind: str, thing: Any) -> str:
    """Return the name of a class that was given as an object. It must lead back to the class, as config.json has no
    more."""
    if isinstance(thing, str):
        return thing
    name = callable_name(thing)
    if "<locals>" in name or import_callable(name, kind) is not thing:
        raise UserError(f"{kind} {name!r} cannot be found by its name: define the class at the top level of a module")
    return name


def check_parts(kind: str, name: str) -> Any:
    """Return the class of this name, and refuse one that lacks a part."""
    target = import_callable(name, kind)
    missing = [part for part in REQUIRED[kind] if not hasattr(target, part)]
    if missing:
        raise UserError(f"{kind} {name!r} has no {', no '.join(missing)}: {GUIDES[kind]} says what it needs")
    return target


def check_mode(name: str) -> None:
    options: Any = mode_traits(check_parts("mode", name)).options
    _check_dataclass("mode", name, options)
    if not issubclass(options, ModeOptions):
        raise UserError(f"the Config of mode {name!r} must inherit freerun.core.ModeOptions")


def check_algorithm(name: str) -> Any:
    target = check_parts("algorithm", name)
    _check_dataclass("algorithm", name, target.Config)
    return target


def _check_dataclass(kind: str, name: str, config: Any) -> None:
    if not dataclasses.is_dataclass(config):
        raise UserError(f"the Config of {kind} {name!r} is no dataclass: its fields become the {kind}'s flags")


# ---------------------------------------------------------------------------------------------- traits


def mode_traits(mode: Any) -> ModeTraits:
    """Return the traits that a class declares. A class of the user's own may leave them out, or mark only what
    differs."""
    traits: ModeTraits = getattr(mode, "traits", ModeTraits())
    changes: dict[str, Any] = {}
    if traits.options is ModeOptions and hasattr(mode, "Config"):
        changes["options"] = mode.Config
    # Classes that were written before there were traits have these three marks.
    if getattr(mode, "takes_turns", False):
        changes["pacing"] = Pacing.TAKES_TURNS
    if getattr(mode, "never_waits", False):
        changes["pacing"] = Pacing.DROPS_STEPS
    if not getattr(mode, "whole_episodes", True):
        changes |= {"hands_over": HandedOver.SEGMENTS, "deterministic": False}
    return dataclasses.replace(traits, **changes) if changes else traits


def algorithm_traits(algorithm: Any, config: Any) -> AlgorithmTraits:
    """Return the traits that a class declares. Without a declaration they follow from the names of its settings."""
    traits: AlgorithmTraits | None = getattr(algorithm, "traits", None)
    if traits is None:
        names = {field.name for field in dataclasses.fields(config)}
        traits = AlgorithmTraits(
            counts_episodes="episodes_per_update" in names,
            counts_steps="steps_per_update" in names,
            rates_segments=hasattr(algorithm, "importance"),
            has_acceleration="acceleration" in names,
            has_network="network" in names,
            code_settings=tuple(sorted(names & {"network", "termination"})),
        )
    if hasattr(config, "default_max_lag"):  # a class variable that was the way to say it before there were traits
        traits = dataclasses.replace(traits, default_max_lag=config.default_max_lag)
    return traits


def tracker_traits(tracker: Any) -> TrackerTraits:
    """Return the traits that a class declares, or those of a tracker that keeps to this machine and needs no
    package."""
    traits: TrackerTraits = getattr(tracker, "traits", TrackerTraits())
    return traits
