"""The two kinds of units that workers are granted: whole episodes, and segments that continue each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.scheduling.rounds import Rounds
from freerun.core import CollectorSettings, EnvFailure, NotFinite, StartPoint

SHORT_UNIT_SECONDS = 0.05
UNITS_AHEAD = 4
"""Short episodes are granted ahead, so that a worker need not wait for its next number; long ones one by one."""


@dataclass(frozen=True)
class FailureRules:
    """What a mode does with an episode in which a worker failed, and how many failures in a row end the run."""

    max_tries: int
    """One worker may fail this often while nobody finishes anything."""
    max_tries_per_episode: int | None
    """One episode may fail this often in the whole run. None where training goes on without a failed episode."""
    repeats_killed_segments: bool
    """True where the episodes of a worker that something else has killed are played again by its successor."""


REPEAT_EPISODES = FailureRules(max_tries=3, max_tries_per_episode=3, repeats_killed_segments=True)
"""Every episode that was started must be trained, so one that failed is run again."""
# If one step in a thousand fails, a batch of a thousand steps without a failure is rare: it takes more tries than three
# to prove that no batch can be finished.
SKIP_EPISODES = FailureRules(max_tries=8, max_tries_per_episode=None, repeats_killed_segments=False)
"""Training goes on without an episode that failed."""


class UnitHolder(Protocol):
    """A worker, as far as its units are concerned."""

    index: int
    units: list[int]
    reserved_units: list[int]

    def suspect_episode(self) -> int | None: ...

    def last_begun_episode(self) -> int | None: ...


class Units(Protocol):
    """How many units a worker may hold, and what becomes of them when it fails. The caller holds the fleet's lock."""

    @property
    def failure_rules(self) -> FailureRules: ...

    @property
    def first_capacity(self) -> int:
        """The number of units that a new worker may hold before it has finished one."""
        ...

    def capacity(self, unit_seconds: float) -> int:
        """Return how many units a worker may hold whose last one took this long."""
        ...

    def worker_starts(self, index: int) -> None: ...

    def worker_retired(self, index: int) -> None: ...

    def resize(self, num_workers: int) -> None: ...

    def suspects(self, worker: UnitHolder, failure: Exception) -> list[int]:
        """Return the episodes that may have caused the failure, as far as they are known."""
        ...

    def give_back(self, worker: UnitHolder, units: list[int], failure: Exception | None) -> list[int]:
        """Take the units of a failure back; return those that only the worker's successor can run."""
        ...

    def renew(self, start: StartPoint) -> None: ...


def process_units_ahead(unit_seconds: float, num_envs: int) -> int:
    """Return how many short episodes a process holds beyond those it plays."""
    return max(UNITS_AHEAD, num_envs // 2) if unit_seconds < SHORT_UNIT_SECONDS else 0


def short_segments_ahead(unit_seconds: float) -> int:
    """Return how many segments one of many workers holds beyond the one it plays: none where they take long.

    The next one would stay with a slow worker while others have nothing to do.
    """
    return 1 if unit_seconds < SHORT_UNIT_SECONDS else 0


class EpisodeUnits:
    """Whole episodes, which any worker may run: one that is lost is run again by whoever is free."""

    failure_rules = REPEAT_EPISODES

    def __init__(
        self,
        settings: CollectorSettings,
        envs_per_worker: int = 1,
        units_ahead: Callable[[float, int], int] = process_units_ahead,
    ):
        self.rounds = Rounds.of_episodes(settings, settings.num_workers * envs_per_worker)
        """The scheduler that these units are granted by."""
        self._num_workers = settings.num_workers
        self._envs_per_worker = envs_per_worker
        self._units_ahead = units_ahead

    @property
    def first_capacity(self) -> int:
        return self._envs_per_worker

    def capacity(self, unit_seconds: float) -> int:
        return self._envs_per_worker + self._units_ahead(unit_seconds, self._envs_per_worker)

    @property
    def envs_per_worker(self) -> int:
        return self._envs_per_worker

    @envs_per_worker.setter
    def envs_per_worker(self, envs_per_worker: int) -> None:
        self._envs_per_worker = envs_per_worker
        self.resize(self._num_workers)

    def resize(self, num_workers: int) -> None:
        """Tell the rounds how many episodes can be played at the same time."""
        self._num_workers = num_workers
        self.rounds.num_envs = num_workers * self._envs_per_worker

    def worker_starts(self, index: int) -> None:
        """An episode belongs to no worker."""

    def worker_retired(self, index: int) -> None:
        """A worker is retired when it holds no episode."""

    def suspects(self, worker: UnitHolder, failure: Exception) -> list[int]:
        if isinstance(failure, NotFinite) and failure.episode is not None:
            return [failure.episode]
        # Of several environments nobody knows which one was stepped.
        episode = worker.suspect_episode() if self._envs_per_worker == 1 else None
        return [] if episode is None else [episode]

    def give_back(self, worker: UnitHolder, units: list[int], failure: Exception | None) -> list[int]:
        given_up = failure.episode if isinstance(failure, NotFinite) else None
        for unit in units:
            if unit == given_up:
                self.rounds.give_up(unit)
            else:
                self.rounds.lost(unit)
        return []

    def renew(self, start: StartPoint) -> None:
        self.rounds.renew(start)


class SegmentUnits:
    """Segments, each of which continues its worker's last one: what is lost, only the worker's successor can run.

    An episode in which a worker failed may fail each time, so the successor goes on after it. Where the cause lay
    outside, the `failure_rules` say whether it plays the episode again.
    """

    first_capacity = 1

    def __init__(
        self,
        accounting: EpisodeAccounting,
        failure_rules: FailureRules = REPEAT_EPISODES,
        units_ahead: Callable[[float], int] = lambda unit_seconds: 1,
    ):
        """With `units_ahead` a worker whose last segment took this long holds as many beyond the one it plays."""
        self.failure_rules = failure_rules
        self._accounting = accounting
        self._units_ahead = units_ahead

    def capacity(self, unit_seconds: float) -> int:
        """The next segment may as well wait at its worker, so that the worker need not wait for it."""
        return 1 + self._units_ahead(unit_seconds)

    def worker_starts(self, index: int) -> None:
        self._accounting.begin_worker(index)

    def worker_retired(self, index: int) -> None:
        self._accounting.retire_worker(index)

    def resize(self, num_workers: int) -> None:
        """A round of segments does not depend on the number of workers."""

    def suspects(self, worker: UnitHolder, failure: Exception) -> list[int]:
        return [failure.episode] if isinstance(failure, NotFinite) and failure.episode is not None else []

    def give_back(self, worker: UnitHolder, units: list[int], failure: Exception | None) -> list[int]:
        is_outside = isinstance(failure, EnvFailure) and failure.from_outside
        plays_again = is_outside and self.failure_rules.repeats_killed_segments
        self._accounting.end_worker(worker.index, None if plays_again else worker.last_begun_episode())
        return units + worker.reserved_units

    def renew(self, start: StartPoint) -> None:
        raise RuntimeError("workers that hand over parts of episodes must be started anew")
