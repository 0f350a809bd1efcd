"""Groups runs that differ only in their seed, and finds the settings in which the groups differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freerun.persistence.run_folder import without_seed

HEADLINE = ("env", "algo", "mode", "num_workers")
"""The settings that the page names for every run."""
MOST_SETTINGS = 20
MOST_CHARACTERS = 60


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed."""

    key: str
    settings: list[str]
    """`name=value` for each setting in which groups with the same headline settings differ."""


def group_runs(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, SeedGroup]:
    """Return the group of each run."""
    shared = {run: {name: json.dumps(value) for name, value in without_seed(configs[run]).items()} for run in configs}
    # The hash of all settings but the seed: equal settings give the same key on every request.
    keys = {
        run: hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        for run, settings in shared.items()
    }
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for run, settings in shared.items():
        alike.setdefault(tuple(settings.get(name) for name in HEADLINE), []).append(run)
    groups: dict[str, SeedGroup] = {}
    for runs in alike.values():
        names = dict.fromkeys(name for run in runs for name in shared[run])
        # Only what differs between runs that would look the same otherwise; the page has room for a few.
        differing = [name for name in names if len({shared[run].get(name) for run in runs}) > 1][:MOST_SETTINGS]
        for run in runs:
            texts = [f"{name}={shared[run].get(name, 'null')[:MOST_CHARACTERS]}" for name in differing]
            groups[run] = SeedGroup(keys[run][:16], texts)
    return groups
