"""Rounds of segments: how many may start, and how many may wait for the learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.scheduling.rounds import Rounds
from freerun.core import CollectorSettings, Counts, Demand, Segment, StartPoint, UserError


def refuse_episodes(demand: Demand, mode: str) -> None:
    """Raise where an algorithm demands whole episodes of a mode that cuts them."""
    if demand.episodes:
        raise UserError(
            f"--episodes-per-update needs whole episodes, which --mode {mode} hands over in pieces: "
            "give --steps-per-update, or choose --mode freerun or pipes"
        )


def refuse_deterministic(settings: CollectorSettings) -> None:
    """Raise where --segment-steps was given together with --deterministic."""
    if settings.deterministic:
        raise UserError(
            "--deterministic compares whole episodes, which segments cut into pieces: leave --segment-steps out"
        )


class UnitRounds(Rounds):
    """Rounds of units that all have `unit_steps` steps. A round takes the first that finish.

    Segments continue each other, so all that a worker plays is trained, however slow it is. Therefore an update need
    not wait for a slow worker's segment: it waits only for those that would be older than the lag allows after it.
    Units of one worker finish in the order of their numbers, so they are taken in this order.
    """

    def __init__(
        self,
        max_lag: int | None,
        unit_steps: int,
        start: StartPoint | None = None,
        most_ahead: float = math.inf,
    ):
        """At most `most_ahead` units start beyond the demand, even where the lag allows more."""
        super().__init__(max_lag, replace(start or StartPoint(), episode=0))
        self._unit_steps = unit_steps
        self._most_ahead = most_ahead
        self._units_per_round = 0  # of the next rounds

    def open(self, demand: Demand) -> None:
        # `_first` is the number of units that were taken so far, and the limits count from it.
        next_steps = demand.steps if demand.next_steps is None else demand.next_steps
        self._steps_left = math.inf if demand.steps_left is None else demand.steps_left
        self._end = self._first + math.ceil(demand.steps / self._unit_steps)
        self._units_per_round = math.ceil(next_steps / self._unit_steps)
        self._raise_limit(self._end, self._rounds_ahead)

    def set_unit_steps(self, unit_steps: int) -> None:
        """Expect units of this many steps from now on. Those that were granted may be longer or shorter."""
        self._unit_steps = unit_steps

    def _raise_limit(self, end: float, rounds_ahead: int) -> None:
        """Allow units up to `end`, the end of a round, and those of the rounds after it."""
        ahead = min(self._units_per_round * rounds_ahead, self._most_ahead)
        self._limit = self._within_run(max(self._limit, end + ahead))

    def _within_run(self, limit: float) -> float:
        """Lower a limit of units to those that the run has steps left for."""
        return min(limit, self._first + self._steps_left / self._unit_steps)

    def _is_below_capacity(self) -> bool:
        """The limit says it all, because the length of every unit is known."""
        return True

    def _settle(self) -> None:
        """No unit waits for one with a lower number."""

    def take(self) -> list[Segment] | None:
        """Return the round in the order of its numbers, or None while too few or one that is due are not finished."""
        due = list(self._due())
        num_units = max(int(self._end) - self._first, len(due))
        if len(self._finished) < num_units or any(number not in self._finished for number in due):
            return None
        # The lowest numbers have started first, so those that are due are among them.
        segments = self._hand_over(sorted(self._finished)[:num_units])
        if len(self._finished) < self._units_per_round:  # the learner would have to wait for its next round
            self._start_early()
        return segments

    def _start_early(self) -> None:
        """Allow more units already during the update: they need not wait for the next `open`."""
        # They start one version before it, so the lag leaves room for one round less.
        if self._rounds_ahead:
            self._raise_limit(self._first + self._units_per_round, self._rounds_ahead - 1)

    def take_arrived(self) -> list[Segment]:
        return self._hand_over(sorted(self._finished))

    def _hand_over(self, numbers: Sequence[int]) -> list[Segment]:
        self._first += len(numbers)
        return super()._hand_over(numbers)


class SegmentRounds(UnitRounds):
    """Rounds of segments, with an account of their episodes.

    With a `queue_size`, only this many may wait beyond the round."""

    def __init__(
        self,
        max_workers: int,
        max_lag: int | None,
        unit_steps: int,
        queue_size: int | None = None,
        start: StartPoint | None = None,
        num_playing: int | None = None,
        most_ahead: float = math.inf,
    ):
        super().__init__(max_lag, unit_steps, start, most_ahead)
        self.accounting = EpisodeAccounting(max_workers, start, num_playing)
        self.queue_size = queue_size

    def open(self, demand: Demand) -> None:
        super().open(demand)
        if self.queue_size is not None:
            self._limit = min(self._limit, self._end + self.queue_size)
            self._fill_queue()

    def resize(self, queue_size: int) -> None:
        """Have another queue size from the next round on. What was granted stays granted."""
        self.queue_size = queue_size

    def finish(self, number: int, segment: Segment, importance: float = 0.0) -> None:
        super().finish(number, segment, importance)
        self.accounting.arrive(number, segment)

    def _hand_over(self, numbers: Sequence[int]) -> list[Segment]:
        segments = super()._hand_over(numbers)
        self._fill_queue()
        return [self.accounting.hand_over(*unit) for unit in zip(numbers, segments, strict=True)]

    def _start_early(self) -> None:
        if self.queue_size is None:  # otherwise the queue says how many may start
            super()._start_early()

    def _fill_queue(self) -> None:
        """Without a limit to the lag, whatever leaves the queue makes room for more."""
        if self.queue_size is not None and self._max_lag is None:
            self._limit = self._within_run(max(self._end, self._first) + self.queue_size)

    def counts(self) -> Counts:
        counts = self.accounting.complete(super().counts())
        if self.queue_size is not None:
            counts.queue_fill = min(1.0, len(self._finished) / self.queue_size)
        return counts
