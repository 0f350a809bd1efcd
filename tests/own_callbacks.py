"""Callbacks of a user's own, good and bad."""

from __future__ import annotations

import freerun


class Raises:
    def on_update(self, update: freerun.Update) -> None:
        if update.number == 2:
            raise RuntimeError("out of ideas")


class StopsAtTwo:
    def on_update(self, update: freerun.Update) -> None:
        if update.number == 2:
            update.stop("two are enough")


class NextLevel:
    """Raises the level of `curriculum_env` after every update."""

    def on_update(self, update: freerun.Update) -> None:
        update.set_env_args(level=update.number)


class WithoutMethod:
    """It has no on_update."""
