"""Tells which runs are the same training with another seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABOUT_ONE_RUN = ("seed", "run_dir", "quiet", "watch", "display")
"""Settings in which runs of one group may differ. Apart from the seed they do not change what is learned."""


def without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all runs of one group have in common."""
    return {name: value for name, value in config.items() if name not in ABOUT_ONE_RUN}
