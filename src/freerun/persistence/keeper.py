"""When a checkpoint is written: every so often after an update, and when a run ends."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from freerun.core import UserError
from freerun.persistence.checkpoint import Checkpoints

logger = logging.getLogger("freerun")

UNITS = {"s": 1, "m": 60, "h": 3600, "": 1, "k": 1000, "M": 1_000_000}
SECONDS = ("s", "m", "h")


@dataclass(frozen=True)
class Interval:
    """Between checkpoints: seconds, or steps; both infinite where none are wanted."""

    seconds: float = float("inf")
    steps: float = float("inf")

    @classmethod
    def read(cls, text: str) -> Interval:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhkM]?)", text)
        if text == "never":
            return cls()
        if match is None or float(match[1]) == 0:
            raise UserError(
                f"--checkpoint-every is a time (60s, 10m, 1h), steps (5000, 50k, 1M) or never, not {text!r}"
            )
        amount = float(match[1]) * UNITS[match[2]]
        return cls(seconds=amount) if match[2] in SECONDS else cls(steps=amount)


class Books(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def is_even(self) -> bool: ...


class Keeper:
    """A sink that keeps the run's state instead of its metrics: a failure to write is said, and never ends the run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        interval: Interval,
        books: Books,
        state: Callable[[Mapping[str, float]], tuple[dict[str, Any], bytes] | None],
        step: int,
        is_resumed: bool,
    ):
        """`state` gives what is to be kept and the policy's own file, or None where it is not worth keeping."""
        self._checkpoints = checkpoints
        self._interval = interval
        self._books = books
        self._state = state
        self._last = (time.monotonic(), step)
        self._metrics: Mapping[str, float] = {}
        self._told = books.version
        self._kept = books.version if is_resumed else -1
        self._must_stop = False
        self._is_failing = False

    def ask_to_stop(self) -> None:
        """After the update that is under way."""
        self._must_stop = True

    @property
    def is_at_rest(self) -> bool:
        """Whether the state may be kept now: between an update of which everything is told, and the next data."""
        return self._told == self._books.version and self._books.is_even

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics, self._told = metrics, self._books.version
        then, steps_then = self._last
        if time.monotonic() - then >= self._interval.seconds or step - steps_then >= self._interval.steps:
            self._last = (time.monotonic(), step)
            self.keep()
        if self._must_stop:
            raise KeyboardInterrupt

    def keep(self) -> bool:
        """Keep the state of now, or, in the middle of something, leave it at the last one; False if that fails."""
        if not self.is_at_rest or self._kept == self._books.version:
            return True
        try:
            state = self._state(self._metrics)
            if state is None:
                return False
            self._checkpoints.write(self._books.version, *state)
        except OSError as error:
            if not self._is_failing:
                logger.warning("no checkpoint could be written: %s; training goes on, the last good one stays", error)
            self._is_failing = True
            return False
        if self._is_failing:
            logger.warning("checkpoints can be written again")
        self._is_failing = False
        self._kept = self._books.version
        return True

    def close(self) -> None:
        """The end is `experiment.run`'s to see to: it knows how the run ended."""
