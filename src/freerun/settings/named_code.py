"""Finds what a run's settings would import, fetch or send data to, before any of it is done, and asks for trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freerun.persistence import trust
from freerun.persistence.redaction import refuse_redacted
from freerun.settings.config import AnyConfig
from freerun.settings.registry import TRACKERS, make_config


def trusted_config(options: Mapping[str, Any], folder: Path, trusted: Sequence[str]) -> AnyConfig:
    """Return the settings of a run folder, which may come from anywhere, if the user trusts the code that they name."""
    # Nothing of it is imported before this check.
    trust.check(code_in(options), folder, trusted)
    refuse_redacted(options)
    return make_config(options)


def code_in(options: Mapping[str, Any]) -> list[str]:
    """Return everything in these settings that needs the user's trust if they come from elsewhere: callables, modules,
    folders, clusters, and where a run's metrics would go. Nothing of it is imported to find out."""
    found = [options.get(name) for name in ("env", "network", "termination", "algo", "mode")]
    env_args = options.get("env_args")
    if isinstance(env_args, Mapping):
        found += [*env_args.values()]
    trackers = _texts(options.get("track"))
    found += [*trackers, *_texts(options.get("callback"))]
    # A colon marks module:callable. Built-in names have none.
    names: list[Any] = [value for value in found if isinstance(value, str) and ":" in value]
    if isinstance(env_args, Mapping):
        names.append(env_args.get("tasks"))  # Isaac Lab: a module that registers more of them
    names += [options.get(name) for name in ("cyborg_path", "ray_runtime_env")]
    if options.get("ray_address") not in ("local", "auto"):
        names.append(options.get("ray_address"))
    # A tracker of the user's own is code that needs trust itself, so it is not asked where it sends its data.
    known = (TRACKERS[name].traits for name in trackers if name in TRACKERS)
    for traits in known:
        if traits.destination_setting is not None:
            destination = options.get(traits.destination_setting)
            names += [] if destination in traits.local_destinations else [destination]
    return sorted({str(name) for name in names if name is not None})


def _texts(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []
