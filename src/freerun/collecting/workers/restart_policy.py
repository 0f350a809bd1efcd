"""What follows the failure of a worker: a restart after a pause, or the end of the run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from freerun.collecting.scheduling.units import REPEAT_EPISODES, SKIP_EPISODES, FailureRules
from freerun.core import (
    CollectorSettings,
    EnvFailure,
    Incident,
    IncidentKind,
    NotFinite,
    OutOfMemory,
    UserError,
    WorkerDied,
    WorkerHung,
    episode_seed,
)

logger = logging.getLogger("freerun")

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MAX_DOUBLINGS = 10
"""More doublings would not lengthen the pause, and a worker that is killed a thousand times would overflow a float."""
TOGETHER_SECONDS = 1.0
"""Workers that are ended from outside within this time count as one failure, as when a machine is lost."""

INCIDENT_KINDS: Mapping[type[Exception], IncidentKind] = {
    OutOfMemory: "out-of-memory",  # before its base class, because the first match counts
    WorkerDied: "death",
    WorkerHung: "hang",
    NotFinite: "not-finite",
}


def incident_kind(failure: Exception) -> IncidentKind:
    return next((kind for type_, kind in INCIDENT_KINDS.items() if isinstance(failure, type_)), "error")


def came_from_outside(failure: Exception) -> bool:
    """True when something else ended the worker, so that the failure says nothing about the environment."""
    return isinstance(failure, EnvFailure) and failure.from_outside


class RestartPolicy:
    """Decides what a failure means: a pause before the restart, or the end of the run. Every mode asks this class.

    The run ends with the failure's own error in three cases: one worker has failed so often, while nobody finished
    anything, that it cannot be chance; an episode that must be trained fails each time; or the budget of
    `--max-failures` is used up. Workers that were killed from outside say nothing about the environment, so they only
    use up the budget. The `rules` of the mode say how many failures are too many.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        rules: FailureRules = REPEAT_EPISODES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings = settings
        self._rules = rules
        self._clock = clock
        self._lock = threading.Lock()  # workers may fail in one thread while others deliver in another
        self._failures_in_a_row: Counter[int] = Counter()  # by worker, since it last delivered
        # By worker and by whether they came from outside, since anybody last delivered.
        self._fruitless: Counter[tuple[int, bool]] = Counter()
        self._failures_of_episode: Counter[int] = Counter()
        self._ended_together: set[int] = set()  # workers ended from outside since `_together_since`
        self._together_since = -math.inf
        self._anybody_delivered = False
        self.num_failures = 0
        """Failures that count against `--max-failures`."""
        self.failures_by_kind: Counter[IncidentKind] = Counter()

    def delivered(self, worker: int) -> None:
        """Note that a worker has finished something: its failures so far were no series."""
        self._anybody_delivered = True
        # This runs for every unit. Without failures, which is the normal case, it must not take the lock.
        if self._failures_in_a_row or self._fruitless:
            with self._lock:
                del self._failures_in_a_row[worker]  # a Counter raises nothing where there is no such key
                self._fruitless.clear()

    def failed(self, worker: int, failure: Exception, suspects: Sequence[int] = ()) -> float:
        """Return how many seconds the worker must pause before its restart, or raise to end the run.

        `suspects` are the episodes that may have caused the failure.
        """
        with self._lock:
            skips_episode = self.skips_episode_after(failure)
            ends_run = isinstance(failure, UserError) and not skips_episode
            self._report(worker, failure, suspects, quietly=ends_run)
            self._failures_in_a_row[worker] += 1
            is_outside = came_from_outside(failure)
            self._fruitless[worker, is_outside] += 1
            if not skips_episode:
                self._count(worker, is_outside)
            if ends_run:
                raise failure
            self._check_tries(worker, failure)
            if len(suspects) == 1 and not (skips_episode or is_outside):
                self._check_episode(suspects[0], failure)
            self._check_budget(failure)
            num_failures = self._failures_in_a_row[worker]
        if num_failures == 1:
            return 0.0
        # 0.1 s, 0.2 s, 0.4 s, … up to 5 s.
        return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(num_failures - 2, MAX_DOUBLINGS))

    def skips_episode_after(self, failure: Exception) -> bool:
        """True when training goes on without the episode, as `--on-nan continue` asks for."""
        return isinstance(failure, NotFinite) and self._settings.on_nan == "continue"

    def _check_tries(self, worker: int, failure: Exception) -> None:
        limit = self._max_tries(failure)
        reason = f"worker {worker} failed {limit} times in a row while nobody finished anything"
        self._end_if(self._fruitless[worker, came_from_outside(failure)] >= limit, reason, failure)

    def _max_tries(self, failure: Exception) -> float:
        """How often one worker may fail like this while nobody finishes anything."""
        if not came_from_outside(failure):
            return (SKIP_EPISODES if self.skips_episode_after(failure) else self._rules).max_tries
        # Whoever kills workers may do so any number of times before one finishes anything. But where nobody saw how
        # a worker ended, and nothing was ever finished in this run, the environment may be what ends it each time.
        may_be_the_environment = isinstance(failure, EnvFailure) and failure.may_be_the_environment
        return SKIP_EPISODES.max_tries if may_be_the_environment and not self._anybody_delivered else math.inf

    def _check_episode(self, episode: int, failure: Exception) -> None:
        limit = self._rules.max_tries_per_episode
        if limit is None:
            return
        self._failures_of_episode[episode] += 1
        seed = episode_seed(self._settings.seed, episode)
        reason = f"episode {episode} (seed {seed}) failed {limit} times"
        self._end_if(self._failures_of_episode[episode] >= limit, reason, failure)

    def _check_budget(self, failure: Exception) -> None:
        budget = self._settings.max_failures
        kinds = ", ".join(f"{number} × {kind}" for kind, number in self.failures_by_kind.most_common())
        reason = f"workers failed {self.num_failures} times ({kinds}), and --max-failures is {budget}"
        self._end_if(self.num_failures > budget, reason, failure)

    def _count(self, worker: int, is_outside: bool) -> None:
        """Count a failure against the budget; several workers that end together from outside count once.

        A worker that ends again counts again. The time runs from the first of them, so that kills without a pause use
        up the budget too.
        """
        now = self._clock()
        if is_outside:
            if now - self._together_since < TOGETHER_SECONDS and worker not in self._ended_together:
                self._ended_together.add(worker)
                return
            self._together_since, self._ended_together = now, {worker}
        self.num_failures += 1

    def _report(self, worker: int, failure: Exception, suspects: Sequence[int], quietly: bool) -> None:
        """Write the incident down. A failure that ends the run reaches the user itself, so it is only logged."""
        kind = incident_kind(failure)
        self.failures_by_kind[kind] += 1
        episode = seed = evidence = None
        if isinstance(failure, NotFinite):
            episode, seed, evidence = failure.episode, failure.seed, failure.evidence
        if episode is None and len(suspects) == 1:
            episode = suspects[0]
        if seed is None and episode is not None:
            seed = episode_seed(self._settings.seed, episode)
        self._settings.report(Incident(worker, time.time(), kind, episode, seed, str(failure), evidence))
        where = f" in episode {episode} (seed {seed})" if episode is not None and kind in ("death", "hang") else ""
        logger.log(logging.INFO if quietly else logging.WARNING, "worker %d failed%s: %s", worker, where, failure)

    def _end_if(self, condition: bool, reason: str, failure: Exception) -> None:
        if condition:
            kind = type(failure) if isinstance(failure, (UserError, EnvFailure)) else EnvFailure
            raise kind(f"the run ends, for {reason}; the last time: {failure}") from failure
