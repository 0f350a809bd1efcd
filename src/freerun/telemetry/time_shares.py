"""Measures who waits for whom: the shares of the wall time since the last record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from freerun.core import Counts, Demand, Metrics, State
from freerun.telemetry.ledger import Ledger
from freerun.transport.state_tracks import SharedTracks

WORKER_STATES = {
    State.BUSY: "workers_busy_share",
    State.WAITING_FOR_SLOT: "workers_waiting_for_slot_share",
    State.WAITING_FOR_WEIGHTS: "workers_waiting_for_weights_share",
    State.WAITING_FOR_OTHERS: "workers_waiting_for_others_share",
    State.RESTARTING: "workers_restarting_share",
}


@dataclass(frozen=True)
class LearnerActivity:
    """What the learner is doing at one moment."""

    doing: str
    """The activity in words."""
    demand: Demand | None = None
    """The data that it waits for; None if it does not wait."""
    steps: int = 0
    """The steps that had been handed over when it began to wait."""
    episodes: int = 0
    """The episodes that had been handed over when it began to wait."""


class TimeShares:
    """Measures how learner and workers spend their time.

    The training loop calls `learner_waits` and `learner_works`. Workers write their state on tracks 0 to n − 1.
    """

    def __init__(
        self, num_workers: int, tracks: SharedTracks | None = None, num_active: Callable[[], int] | None = None
    ):
        """The learner's track is number `num_workers`. `num_active` says how many workers are not parked."""
        self._num_workers = num_workers
        self._num_active = num_active or (lambda: num_workers)
        self._tracks = tracks
        self._learner_seconds = dict.fromkeys(State, 0.0)
        self._learner_state = State.BUSY
        self.activity = LearnerActivity("starting")
        """Replaced as a whole and never changed, so that the thread of a display can read it without a lock."""
        self._learner_since = self._began_at = time.perf_counter()
        self._last = (self._began_at, 0, 0, 0, 0.0)  # time, steps, episodes, updates, busy seconds
        self._last_worker_seconds = self._worker_seconds()

    def begin(self, ledger: Ledger, counts: Counts) -> None:
        """Begin to measure. A run that was resumed counts on from where the earlier one has ended."""
        now = time.perf_counter()
        self._began_at = now - ledger.seconds_before
        self._learner_since = now
        self._last = (now, ledger.steps, ledger.episodes, ledger.version, counts.busy_seconds)

    def learner_waits(self, demand: Demand, ledger: Ledger) -> None:
        """Note that the learner waits for this data from now on."""
        self._set_learner_state(State.WAITING_FOR_DATA)
        self.activity = LearnerActivity("waiting", demand, ledger.steps, ledger.episodes)

    def learner_works(self, doing: str) -> None:
        """Note that the learner does not wait from now on; `doing` says in words what it does."""
        self._set_learner_state(State.BUSY)
        self.activity = LearnerActivity(doing)

    def _set_learner_state(self, state: State) -> None:
        now = time.perf_counter()
        self._learner_seconds[self._learner_state] += now - self._learner_since
        self._learner_state, self._learner_since = state, now
        if self._tracks is not None:
            self._tracks.set_state(self._num_workers, state)

    def _worker_seconds(self) -> list[float]:
        """Return the seconds spent in each state so far, summed over all workers."""
        if self._tracks is None:
            return [0.0] * len(State)
        totals = [self._tracks.totals(worker) for worker in range(self._num_workers)]
        return [sum(seconds) for seconds in zip(*totals, strict=True)]

    def rates(self, steps: int, episodes: int, updates: int, busy_seconds: float) -> Metrics:
        """Return rates and shares since the last call. The arguments are totals since the beginning of the run."""
        self._set_learner_state(self._learner_state)  # count the current state up to now
        now = (time.perf_counter(), steps, episodes, updates, busy_seconds)
        # Differences of totals, so that nothing is lost between two records.
        seconds, new_steps, new_episodes, new_updates, new_busy = (a - b for a, b in zip(now, self._last, strict=True))
        rates = {
            "wall_seconds": now[0] - self._began_at,
            "interval_seconds": seconds,
            "steps_per_second": new_steps / seconds,
            "episodes_per_second": new_episodes / seconds,
            "updates_per_second": new_updates / seconds,
            "learner_waiting_share": self._learner_seconds[State.WAITING_FOR_DATA] / seconds,
            "learner_updating_share": self._learner_seconds[State.BUSY] / seconds,
            **self._worker_shares(seconds * self._num_active(), new_busy),
        }
        self._last = now
        self._learner_seconds = dict.fromkeys(State, 0.0)
        return rates

    def _worker_shares(self, seconds_of_all: float, delivered_busy_seconds: float) -> Metrics:
        """Return the share of all workers' time that was spent in each state."""
        totals = self._worker_seconds()
        spent = [new - old for new, old in zip(totals, self._last_worker_seconds, strict=True)]
        self._last_worker_seconds = totals
        # Workers of some modes write no track. Their segments say how long they took.
        if not any(totals):
            return {"workers_busy_share": min(1.0, delivered_busy_seconds / seconds_of_all)}
        # A span that ends while it is read may be missing or be counted twice (see `SharedTracks.totals`), hence the
        # limits.
        return {
            name: min(1.0, max(0.0, spent[state] / seconds_of_all))
            for state, name in WORKER_STATES.items()
            if state == State.BUSY or totals[state]
        }
