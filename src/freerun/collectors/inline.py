"""Collecting in the learner's own thread: they take turns, so no step is ever older than the newest weights."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from freerun.collectors.rollout import Rollout
from freerun.collectors.rounds import Rounds
from freerun.collectors.solo import Solo
from freerun.collectors.supervision import Silence, Supervisor, look_seconds, thread_stack
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    EnvFailure,
    FloatArray,
    NotFinite,
    Policy,
    Segment,
    Start,
    State,
    UserError,
    VectorEnv,
)

logger = logging.getLogger("freerun")


class Inline:
    """One rollout over one vector environment, driven by `collect`.

    When an environment fails, all are built anew, and the episodes that were open are run again. Steps of episodes that
    are handed over in parts cannot be taken back: those episodes stay cut where they were.
    """

    def __init__(self, make_env: Callable[[], VectorEnv | Rollout | Solo], policy: Policy, settings: CollectorSettings):
        """`make_env` may return a rollout over its environments, too."""
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
        self._supervisor = Supervisor(settings)
        self._rounds = Rounds(max_lag=0, start=settings.start)
        self._weights: tuple[FloatArray, int] | None = None
        self._open: set[int] = set()  # begun, and not finished
        self._rollout: Rollout | Solo | None = None
        self._first_episode = self._next_episode = settings.start.episode
        self._newest_handed_over = settings.start.episode - 1
        self._state = "starting"
        self._word = _Word(settings.step_timeout, self)
        try:
            self._build()
        except BaseException:
            self._word.close()
            raise
        self._state = "waiting"

    def _build(self) -> Rollout | Solo:
        """Environments and a rollout: again and again, until the supervisor has had enough."""
        while self._rollout is None:
            try:
                made = self._make_env()
            except EnvFailure as failure:
                self._rest(failure, [])
                continue
            self._rollout = made if isinstance(made, Rollout | Solo) else Rollout(made, self._policy, self._seed)
            if self._weights is not None:
                self._rollout.load(*self._weights)
        return self._rollout

    @property
    def beats(self) -> int:
        return self._rollout.vitals.beats if self._rollout is not None else -1

    @property
    def state(self) -> str:
        return self._state

    def counts(self) -> Counts:
        counts = self._rounds.counts()
        # Of episodes handed over in parts, those count whose first step the ledger has seen.
        counts.episodes_started += self._newest_handed_over + 1 - self._first_episode
        return counts

    def publish(self, weights: FloatArray, version: int) -> None:
        self._weights = (weights, version)
        self._build().load(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        self._state = "busy"
        try:
            if demand.steps and not demand.whole_episodes:
                return [self._collect_steps(math.ceil(demand.steps / self._build().num_envs))]
            self._rounds.open(demand)
            while (segments := self._rounds.take()) is None:
                self._play_round()
            return segments
        finally:
            self._state = "waiting"

    def _play_round(self) -> None:
        try:
            for segment in self._build().episodes(self._next_of_round):
                number = int(segment.episode[0, 0])
                self._rounds.finish(number, segment.copy())
                self._open.remove(number)
                self._supervisor.delivered(0)
        except (EnvFailure, NotFinite) as failure:
            suspects = [failure.episode] if isinstance(failure, NotFinite) and failure.episode is not None else []
            self._fail(failure, suspects or (list(self._open) if len(self._open) == 1 else []))

    def _next_of_round(self, wait: bool) -> int | None:
        number = self._rounds.next()
        if number is not None:
            self._open.add(number)
        return number

    def _collect_steps(self, steps_per_env: int) -> Segment:
        while True:
            try:
                segment = next(self._build().segments(steps_per_env, self._number)).copy()
                break
            except (EnvFailure, NotFinite) as failure:
                self._fail(failure, [])
        self._supervisor.delivered(0)
        self._newest_handed_over = int(segment.episode.max())
        last = segment.episode[-1][~segment.ended[-1]]
        self._open = {int(number) for number in last}
        self._rounds.book.steps_delivered += segment.num_steps
        self._rounds.book.busy_seconds += segment.seconds
        return segment

    def _number(self, wait: bool) -> int:
        self._next_episode += 1
        return self._next_episode - 1

    def _fail(self, failure: Exception, suspects: list[int]) -> None:
        self._close_env()
        self._rest(failure, suspects)
        bad = failure.episode if isinstance(failure, NotFinite) else None
        if self._next_episode == self._first_episode:  # episodes are handed over whole
            for number in sorted(self._open):
                if number == bad:
                    self._rounds.give_up(number)
                else:
                    self._rounds.lost(number)
        else:
            self._rounds.book.episodes_cut += len(self._open)
            if bad is not None and bad > self._newest_handed_over:  # with those before it that nobody has seen
                self._rounds.book.episodes_dropped += bad - self._newest_handed_over
                self._newest_handed_over = bad
            self._next_episode = self._newest_handed_over + 1
        self._open = set()

    def _rest(self, failure: Exception, suspects: list[int]) -> None:
        seconds = self._supervisor.failed(getattr(failure, "worker", None) or 0, failure, suspects)
        self._rounds.book.worker_restarts += 1
        self._rounds.book.segments_rejected += isinstance(failure, NotFinite)
        for track in range(self.num_workers):
            self._tracks.enter(track, State.RESTARTING)
        self._state = "resting"
        time.sleep(seconds)
        self._state = "busy"

    def renew(self, start: Start) -> None:
        self._rounds.renew(start)

    def close(self) -> None:
        self._word.close()
        self._close_env()

    def _close_env(self) -> None:
        if self._rollout is not None:
            rollout, self._rollout = self._rollout, None
            rollout.close()


class _Word:
    """Says where the learner's thread is stuck, if it is: nobody can help it from here, but silence would be worse."""

    def __init__(self, timeout: float, watched: Inline):
        self._timeout = timeout
        self._watched = watched
        self._main = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="freerun-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        silence = Silence(look_seconds(self._timeout))
        while not self._closing.wait(look_seconds(self._timeout)):
            silence.look({0: (self._watched.state, self._watched.beats)})
            if self._watched.state in ("starting", "busy") and silence.seconds(0) >= self._timeout:
                silence.forgive(0)
                logger.warning(
                    "no environment has made a step for %g s (--step-timeout); the stack:\n%s",
                    self._timeout,
                    thread_stack(self._main),
                )

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
