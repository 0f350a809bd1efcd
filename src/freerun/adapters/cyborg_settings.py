"""The settings of cyborg/CAGE2-v0. They are apart from `cyborg.py`, so that workers need not import tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from freerun.core import Common
from freerun_envs.defence_settings import DefenceSettings


@dataclass(frozen=True)
class CAGE2Settings(DefenceSettings):
    """CAGE challenge 2: the settings of cyber defence, and where CybORG lies."""

    env_arguments: ClassVar[tuple[str, ...]] = (*DefenceSettings.env_arguments, "cyborg_path")

    cyborg_path: Common[Path | None] = None
    """The folder that holds the CybORG package (if not given: an installed one)."""
