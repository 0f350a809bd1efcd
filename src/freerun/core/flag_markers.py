"""Marks on the fields of settings classes."""

from __future__ import annotations

from typing import Annotated, TypeVar

Setting = TypeVar("Setting")
COMMON = "shown by --help"
Common = Annotated[Setting, COMMON]
"""Marks a setting that most people need, as in `learning_rate: Common[float] = 3e-4`. `freerun train --help` shows the
common settings, and `--help-all` shows all of them."""
