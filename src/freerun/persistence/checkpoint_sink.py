"""Decides when a checkpoint is written: after an update when the interval is over, and when a run ends."""

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
TIME_UNITS = ("s", "m", "h")
LARGEST_SHARE = 0.1
"""Checkpoints after long updates may take at most this share of the time."""


@dataclass(frozen=True)
class Interval:
    """The interval between checkpoints, in seconds or in steps. Both are infinite if none are wanted."""

    seconds: float = float("inf")
    steps: float = float("inf")

    @classmethod
    def read(cls, text: str) -> Interval:
        """Read the value of --checkpoint-every."""
        # 60s, 10m and 1h are times; 5000, 50k and 1M are steps. So "m" and "M" differ.
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhkM]?)", text)
        if text == "never":
            return cls()
        if match is None or float(match[1]) == 0:
            raise UserError(
                f"--checkpoint-every is a time (60s, 10m, 1h), steps (5000, 50k, 1M) or never, not {text!r}"
            )
        amount = float(match[1]) * UNITS[match[2]]
        return cls(seconds=amount) if match[2] in TIME_UNITS else cls(steps=amount)

    @property
    def is_never(self) -> bool:
        return self == Interval()


class UpdateStatus(Protocol):
    """What this sink needs to know from the ledger."""

    @property
    def version(self) -> int: ...
    @property
    def has_untrained_steps(self) -> bool: ...


class CheckpointSink:
    """A sink that saves the state of the run. A failure to write is logged and never ends the run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        interval: Interval,
        ledger: UpdateStatus,
        state: Callable[[Mapping[str, float]], tuple[dict[str, Any], bytes] | None],
        step: int,
        is_resumed: bool,
        long_seconds: float,
    ):
        """`state` gives the state and the content of the policy's file, or None if the state is not worth saving.

        When a run is interrupted, it does not wait longer than `long_seconds` for its update. So if updates take that
        long, each one is saved as soon as it is complete, whatever the interval.
        """
        self._checkpoints = checkpoints
        self._interval = interval
        self._ledger = ledger
        self._state = state
        self._last_due = (time.monotonic(), step)
        self._metrics: Mapping[str, float] = {}
        self._recorded_update = ledger.version
        self.saved_update = ledger.version if is_resumed else -1
        """The update whose state the newest checkpoint holds; -1 if there is none."""
        self._must_stop = False  # a signal handler sets it; one store needs no lock
        self._is_failing = False
        self._long_seconds = long_seconds
        self._last_record_at = self._last_saved_at = time.monotonic()
        self._save_seconds = 0.0  # how long the last checkpoint took

    def saved_policy(self) -> bytes | None:
        """Return the policy of the update that was saved last."""
        return self._checkpoints.policy_of(self.saved_update)

    def ask_to_stop(self) -> None:
        """Have the next `write`, after the current update, raise KeyboardInterrupt. A signal handler calls this."""
        self._must_stop = True

    @property
    def can_save(self) -> bool:
        """True between the record of an update and the next data. At other moments the state is half of an update."""
        return self._recorded_update == self._ledger.version and not self._ledger.has_untrained_steps

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics, self._recorded_update = metrics, self._ledger.version
        now, (then, steps_then) = time.monotonic(), self._last_due
        is_due = now - then >= self._interval.seconds or step - steps_then >= self._interval.steps
        if is_due or self._was_long(now):
            # The interval counts from the attempt, so that a full disk is not tried again after every update.
            self._last_due = (now, step)
            self.save()
        self._last_record_at = time.monotonic()
        # Raised here and not in the signal handler: the update is complete, and its record is written.
        if self._must_stop:
            raise KeyboardInterrupt

    def _was_long(self, now: float) -> bool:
        """True if the update took so long that an interrupt would not wait for the next, and a checkpoint is cheap."""
        is_cheap = self._save_seconds <= LARGEST_SHARE * (now - self._last_saved_at)
        return now - self._last_record_at > self._long_seconds and is_cheap and not self._interval.is_never

    def save(self) -> bool:
        """Write a checkpoint of this moment; False if that fails.

        In the middle of an update, or if this update was saved before, the last checkpoint is the right one.
        """
        if not self.can_save or self.saved_update == self._ledger.version:
            return True
        began = time.monotonic()
        try:
            state = self._state(self._metrics)
            if state is None:
                return False
            self._checkpoints.write(self._ledger.version, *state)
        except OSError as error:
            if not self._is_failing:  # once, and not at every attempt
                logger.warning("no checkpoint could be written: %s; training goes on, the last good one stays", error)
            self._is_failing = True
            return False
        if self._is_failing:
            logger.warning("checkpoints can be written again")
        self._is_failing = False
        self.saved_update = self._ledger.version
        self._last_saved_at = time.monotonic()
        self._save_seconds = self._last_saved_at - began
        return True

    def close(self) -> None:
        """Whoever ends the run saves its last state, because only that knows how the run ended."""
