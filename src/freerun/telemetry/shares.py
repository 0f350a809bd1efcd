"""Who waits for whom, as shares of the wall clock since the last report."""

from __future__ import annotations

import time
from collections.abc import Callable

from freerun.core import Counts, Metrics, State
from freerun.telemetry.ledger import Ledger
from freerun.transport.tracks import Tracks

WORKER_STATES = {
    State.BUSY: "workers_busy_share",
    State.WAITING_FOR_SLOT: "workers_waiting_for_slot_share",
    State.WAITING_FOR_WEIGHTS: "workers_waiting_for_weights_share",
    State.WAITING_FOR_OTHERS: "workers_waiting_for_others_share",
    State.RESTARTING: "workers_restarting_share",
}


class Shares:
    """Of the learner, which tells here what it does, and of the workers, which note it on tracks 0 to n − 1."""

    def __init__(self, num_workers: int, tracks: Tracks | None = None, num_active: Callable[[], int] | None = None):
        """The learner's track follows those of the workers, of which some may be parked."""
        self._num_workers = num_workers
        self._num_active = num_active or (lambda: num_workers)
        self._tracks = tracks
        self._learner_seconds = dict.fromkeys(State, 0.0)
        self._learner_state = State.BUSY
        self._learner_since = self._first_second = time.perf_counter()
        self._last = (self._first_second, 0, 0, 0, 0.0)
        self._last_worker_seconds = self._worker_seconds()

    def begin(self, ledger: Ledger, counts: Counts) -> None:
        """A run may go on from where another has left off."""
        now = time.perf_counter()
        self._first_second = now - ledger.seconds_before
        self._last = (now, ledger.steps, ledger.episodes, ledger.version, counts.busy_seconds)

    def learner_enters(self, state: State) -> None:
        now = time.perf_counter()
        self._learner_seconds[self._learner_state] += now - self._learner_since
        self._learner_state, self._learner_since = state, now
        if self._tracks is not None:
            self._tracks.enter(self._num_workers, state)

    def _worker_seconds(self) -> list[float]:
        """In each state, over all workers."""
        if self._tracks is None:
            return [0.0] * len(State)
        of_workers = [self._tracks.totals(worker) for worker in range(self._num_workers)]
        return [sum(seconds) for seconds in zip(*of_workers, strict=True)]

    def rates(self, steps: int, episodes: int, updates: int, busy_seconds: float) -> Metrics:
        """Rates since the last call; the counts are totals."""
        self.learner_enters(self._learner_state)
        now = (time.perf_counter(), steps, episodes, updates, busy_seconds)
        seconds, new_steps, new_episodes, new_updates, new_busy = (a - b for a, b in zip(now, self._last, strict=True))
        rates = {
            "wall_seconds": now[0] - self._first_second,
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
        totals = self._worker_seconds()
        spent = [new - old for new, old in zip(totals, self._last_worker_seconds, strict=True)]
        self._last_worker_seconds = totals
        if not any(totals):  # a mode whose workers note nothing: their time counts when it is handed over
            return {"workers_busy_share": min(1.0, delivered_busy_seconds / seconds_of_all)}
        return {
            name: min(1.0, max(0.0, spent[state] / seconds_of_all))
            for state, name in WORKER_STATES.items()
            if state == State.BUSY or totals[state]
        }
