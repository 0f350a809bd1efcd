"""Collecting in the learner's own thread: they take turns, so no step is ever older than the newest weights."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.collecting.scheduling.rounds import Rounds
from freerun.collecting.workers.hang_detector import Activity, HangDetector, SignOfLife, thread_stack
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    EnvFailure,
    FloatArray,
    NotFinite,
    Policy,
    Segment,
    StartPoint,
    State,
    UserError,
    VectorEnv,
    WorkerHung,
)

logger = logging.getLogger("freerun")


class InlineCollector:
    """One rollout over one vector environment, driven by `collect`.

    When an environment fails, all are built anew, and the episodes that were open are run again. Steps of episodes that
    are handed over in parts cannot be taken back: those episodes stay cut where they were.
    """

    def __init__(
        self,
        make_env: Callable[[], VectorEnv | Rollout | SingleEnvRollout],
        policy: Policy,
        settings: CollectorSettings,
    ):
        """`make_env` returns environments, or a rollout over its environments."""
        if settings.max_lag:
            raise UserError(
                "this mode collects and learns in turns, so --max-lag must be 0: "
                "choose --mode pipes or --mode executor to collect while the learner updates"
            )
        self.num_workers = settings.num_workers
        self._make_env = make_env
        self._policy = policy
        self._seed = settings.seed
        self._tracks = settings.tracks
        self._restart_policy = RestartPolicy(settings)
        self._rounds = Rounds.of_episodes(replace(settings, max_lag=0), settings.num_workers)
        self._weights: tuple[FloatArray, int] | None = None
        self._open: set[int] = set()  # episodes that have begun and not finished
        self._rollout: Rollout | SingleEnvRollout | None = None
        # Episodes that are handed over in parts are numbered here, not by the rounds.
        self._first_episode = self._next_episode = settings.start.episode
        self._newest_handed_over = settings.start.episode - 1
        self._thread = _CollectingThread(settings.step_timeout, self._num_beats)
        self._detector = HangDetector(settings, lambda: [self._thread])
        self._detector.start()
        try:
            self._build()
        except BaseException:
            self._detector.close()
            raise
        self._thread.activity = Activity.WAITING

    def _build(self) -> Rollout | SingleEnvRollout:
        """Return the rollout; build it first, again and again, until the restart policy ends the run."""
        while self._rollout is None:
            try:
                made = self._make_env()
            except EnvFailure as failure:
                self._pause(failure, [])
                continue
            self._rollout = (
                made if isinstance(made, Rollout | SingleEnvRollout) else Rollout(made, self._policy, self._seed)
            )
            if self._weights is not None:
                self._rollout.load(*self._weights)
        return self._rollout

    def _num_beats(self) -> int:
        return self._rollout.heartbeat.num_beats if self._rollout is not None else 0

    def counts(self) -> Counts:
        counts = self._rounds.counts()
        counts.step_calls = self._num_beats()
        # Episodes that are handed over in parts count from their first step on, because then the ledger knows them.
        counts.episodes_started += self._newest_handed_over + 1 - self._first_episode
        return counts

    def publish(self, weights: FloatArray, version: int) -> None:
        self._weights = (weights, version)
        self._build().load(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if not demand:
            return self._rounds.take_arrived()
        self._thread.activity = Activity.BUSY
        try:
            if demand.steps and not demand.whole_episodes:
                return self._collect_steps(math.ceil(demand.steps / self._build().num_envs))
            self._rounds.open(demand)
            while (segments := self._rounds.take()) is None:
                self._play_round()
            return segments
        finally:
            self._thread.activity = Activity.WAITING

    def _play_round(self) -> None:
        try:
            for segment in self._build().episodes(self._next_of_round):
                number = int(segment.episode[0, 0])
                self._rounds.finish(number, segment.copy())
                self._open.remove(number)
                self._note_delivery()
        except (EnvFailure, NotFinite) as failure:
            if isinstance(failure, NotFinite) and failure.episode is not None:
                suspects = [failure.episode]
            else:
                suspects = list(self._open) if len(self._open) == 1 else []
            self._fail(failure, suspects)

    def _next_of_round(self, wait: bool) -> int | None:
        number = self._rounds.next()
        if number is not None:
            self._open.add(number)
        return number

    def _collect_steps(self, steps_per_env: int) -> list[Segment]:
        while True:
            try:
                segment = next(self._build().segments(steps_per_env, self._next_number)).copy()
                break
            except (EnvFailure, NotFinite) as failure:
                self._fail(failure, [])
        self._note_delivery()
        self._rounds.totals.steps_delivered += segment.num_steps
        self._rounds.totals.busy_seconds += segment.seconds
        # An episode that has only been reset so far is not handed over yet.
        is_step = True if segment.resting is None else ~segment.resting
        self._newest_handed_over = int(segment.episode[np.broadcast_to(is_step, segment.episode.shape)].max())
        is_open = ~segment.ended[-1] & (segment.episode[-1] <= self._newest_handed_over)
        self._open = set(segment.episode[-1][is_open].tolist())
        return without_resting_rows([segment])

    def _note_delivery(self) -> None:
        """All environments step together, so every worker has a part in what one delivers."""
        for worker in range(self.num_workers):
            self._restart_policy.delivered(worker)

    def _next_number(self, wait: bool) -> int:
        self._next_episode += 1
        return self._next_episode - 1

    def _fail(self, failure: Exception, suspects: list[int]) -> None:
        self._close_env()
        self._pause(failure, suspects)
        bad_episode = failure.episode if isinstance(failure, NotFinite) else None
        if self._next_episode == self._first_episode:  # episodes are handed over whole
            for number in sorted(self._open):
                if number == bad_episode:
                    self._rounds.give_up(number)
                else:
                    self._rounds.lost(number)
        else:
            self._rounds.totals.episodes_cut += len(self._open)
            if bad_episode is not None and bad_episode > self._newest_handed_over:
                # Episodes before it that the learner has not seen are dropped with it: numbers only go up.
                self._rounds.totals.episodes_dropped += bad_episode - self._newest_handed_over
                self._newest_handed_over = bad_episode
            self._next_episode = self._newest_handed_over + 1
        self._open = set()

    def _pause(self, failure: Exception, suspects: list[int]) -> None:
        """Wait before the environments are built again; raise if the run must end."""
        worker = failure.worker if isinstance(failure, EnvFailure) else None
        seconds = self._restart_policy.failed(worker or 0, failure, suspects)
        self._rounds.totals.worker_restarts += 1
        self._rounds.totals.segments_rejected += isinstance(failure, NotFinite)
        for track in range(self.num_workers):
            self._tracks.set_state(track, State.RESTARTING)
        activity, self._thread.activity = self._thread.activity, Activity.WAITING
        time.sleep(seconds)
        self._thread.activity = activity

    def renew(self, start: StartPoint) -> None:
        self._rounds.renew(start)

    def close(self) -> None:
        self._detector.close()
        self._close_env()

    def _close_env(self) -> None:
        if self._rollout is not None:
            rollout, self._rollout = self._rollout, None
            rollout.close()


class _CollectingThread:
    """The learner's thread, as the hang detector sees it. Nobody can end it, but silence would be worse: it warns."""

    index = 0

    def __init__(self, step_timeout: float, num_beats: Callable[[], int]):
        self.activity = Activity.BUSY  # it builds environments; a warning that comes early does no harm
        self._timeout = step_timeout
        self._num_beats = num_beats
        self._thread_id = threading.get_ident()

    def sign_of_life(self) -> SignOfLife:
        return SignOfLife(self._thread_id, self.activity, self._num_beats())

    def episode(self) -> int | None:
        return None

    def is_stopped(self) -> bool:
        return False

    def has_place(self) -> bool:
        return True

    def stack(self) -> str:
        return thread_stack(self._thread_id)

    def note_slow_start(self) -> None:
        """It never counts as starting."""

    def end_hung(self, failure: WorkerHung) -> None:
        logger.warning(
            "no environment has made a step for %g s (--step-timeout); the stack:\n%s", self._timeout, self.stack()
        )
