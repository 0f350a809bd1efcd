"""Rounds of segments: how many may start, and how many may wait for the learner."""

from __future__ import annotations

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


class SegmentRounds(Rounds):
    """Rounds of segments of `unit_steps` steps. With a `queue_size`, only this many may wait beyond the round."""

    def __init__(
        self,
        max_workers: int,
        max_lag: int | None,
        unit_steps: int,
        queue_size: int | None = None,
        start: StartPoint | None = None,
        num_playing: int | None = None,
    ):
        super().__init__(max_lag, unit_steps, start)
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

    def set_unit_steps(self, unit_steps: int) -> None:
        """Expect segments of this many steps from now on. Those that were granted may be longer or shorter."""
        self._unit_steps = unit_steps

    def finish(self, number: int, segment: Segment, importance: float = 0.0) -> None:
        super().finish(number, segment, importance)
        self.accounting.arrive(number, segment)

    def _hand_over(self, number: int) -> Segment:
        return self.accounting.hand_over(number, super()._hand_over(number))

    def _take_until(self, end: int) -> list[Segment]:
        segments = super()._take_until(end)
        self._fill_queue()
        return segments

    def _fill_queue(self) -> None:
        """Without a limit to the lag, whatever leaves the queue makes room for more."""
        if self.queue_size is not None and self._max_lag is None:
            self._limit = self._within_run(max(self._end, self._first) + self.queue_size)

    def counts(self) -> Counts:
        counts = self.accounting.complete(super().counts())
        if self.queue_size is not None:
            counts.queue_fill = min(1.0, len(self._finished) / self.queue_size)
        return counts
