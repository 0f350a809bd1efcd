"""Workers that die, hang or raise: found out, told of, started again after a rest, no more often than makes sense."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from freerun.collectors.worker import Monitor
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
from freerun.transport.deaths import Coroner, is_stopped

logger = logging.getLogger("freerun")

TRIES = 3
"""So often one worker may fail before anybody gets anything done, and one episode at all, where it must be trained."""
TOLERATED_TRIES = 8
"""Where training goes on without it: a batch of a thousand steps that never fails is rare if one in a thousand does."""
REST_SECONDS = 0.1
MOST_REST_SECONDS = 5.0
START_SECONDS = 60.0
"""A worker may take so long to build its environments, if that is more than the step timeout."""
LOOK_SECONDS = 0.25
TOGETHER_SECONDS = 1.0


KINDS: Mapping[type[Exception], IncidentKind] = {
    OutOfMemory: "out-of-memory",
    WorkerDied: "death",
    WorkerHung: "hang",
    NotFinite: "not-finite",
}


def kind_of(failure: Exception) -> IncidentKind:
    return next((name for kind, name in KINDS.items() if isinstance(failure, kind)), "error")


# ---------------------------------------------------------------------------------------------- what follows a failure


class Supervisor:
    """Decides what a failure means: a rest, or the end of the run. Every mode asks the same one.

    The run ends with the failure's own error when one worker has failed so often that it cannot be chance while nobody
    got anything done, when an episode that must be trained fails each time, or when the budget is used up.
    """

    def __init__(self, settings: CollectorSettings, tolerant: bool = False):
        self._settings = settings
        self._tolerant = tolerant
        self._lock = threading.Lock()
        self._in_a_row: Counter[int] = Counter()  # of each worker, since it delivered
        self._fruitless: Counter[int] = Counter()  # of each worker, since anybody delivered
        self._of_episode: Counter[int] = Counter()
        self._last_from_outside = -math.inf
        self.num_failures = 0
        self.by_kind: Counter[IncidentKind] = Counter()

    def delivered(self, worker: int) -> None:
        if self._in_a_row or self._fruitless:
            with self._lock:
                del self._in_a_row[worker]
                self._fruitless.clear()

    def failed(self, worker: int, failure: Exception, episodes: Sequence[int] = ()) -> float:
        """The seconds that the worker rests. `episodes` are those that it may have failed in."""
        with self._lock:
            self._tell(worker, failure, episodes)
            self._in_a_row[worker] += 1
            self._fruitless[worker] += 1
            goes_on = self.goes_on_after(failure)
            if not goes_on:
                self._count(failure)
            # Whoever kills workers may do so several times before one gets anything done.
            limit = TOLERATED_TRIES if self._tolerant or goes_on or came_from_outside(failure) else TRIES
            if isinstance(failure, UserError) and not self.goes_on_after(failure):
                raise failure
            fruitless = f"worker {worker} failed {limit} times in a row while nobody finished anything"
            self._end_if(self._fruitless[worker] >= limit, fruitless, failure)
            if len(episodes) == 1 and not (self._tolerant or goes_on or came_from_outside(failure)):
                (episode,) = episodes
                self._of_episode[episode] += 1
                seed = episode_seed(self._settings.seed, episode)
                tries = f"episode {episode} (seed {seed}) failed {TRIES} times"
                self._end_if(self._of_episode[episode] >= TRIES, tries, failure)
            most = self._settings.max_failures
            kinds = ", ".join(f"{number} × {kind}" for kind, number in self.by_kind.most_common())
            spent = f"workers failed {self.num_failures} times ({kinds}), and --max-failures is {most}"
            self._end_if(self.num_failures > most, spent, failure)
            times = self._in_a_row[worker]
        return 0.0 if times == 1 else min(MOST_REST_SECONDS, REST_SECONDS * 2.0 ** (times - 2))

    def _count(self, failure: Exception) -> None:
        """Workers that fall together, as when a machine is lost, are one failure."""
        before, now = self._last_from_outside, time.monotonic()
        if came_from_outside(failure):
            self._last_from_outside = now
            if now - before < TOGETHER_SECONDS:
                return
        self.num_failures += 1

    def goes_on_after(self, failure: Exception) -> bool:
        """Whether the episode is given up and training goes on, as --on-nan continue asks for."""
        return isinstance(failure, NotFinite) and self._settings.on_nan == "continue"

    def _tell(self, worker: int, failure: Exception, episodes: Sequence[int]) -> None:
        kind = kind_of(failure)
        self.by_kind[kind] += 1
        episode = getattr(failure, "episode", None)
        if episode is None and len(episodes) == 1:
            episode = episodes[0]
        seed = getattr(failure, "seed", None)
        if seed is None and episode is not None:
            seed = episode_seed(self._settings.seed, episode)
        evidence = getattr(failure, "evidence", None)
        self._settings.report(Incident(worker, time.time(), kind, episode, seed, str(failure), evidence))
        where = "" if episode is None else f" in episode {episode} (seed {seed})"
        logger.warning("worker %d failed%s: %s", worker, where if kind in ("death", "hang") else "", failure)

    def _end_if(self, condition: bool, reason: str, failure: Exception) -> None:
        if condition:
            kind = type(failure) if isinstance(failure, (UserError, EnvFailure)) else EnvFailure
            raise kind(f"the run ends, for {reason}; the last time: {failure}") from failure


def came_from_outside(failure: Exception) -> bool:
    return isinstance(failure, EnvFailure) and failure.from_outside


# ---------------------------------------------------------------------------------------------- hangs


class Silence:
    """How long each worker has shown no sign of life, counted only while somebody was listening.

    A learner that was stopped or starved itself must not find all of its workers dead when it goes on.
    """

    def __init__(self, look_seconds: float) -> None:
        self._most = 4 * look_seconds
        self._last_look = time.monotonic()
        self._seen: dict[int, object] = {}
        self._silent: dict[int, float] = {}

    def look(self, signs: Mapping[int, object]) -> None:
        """`signs` of a worker are equal to those of the last look if it has not moved since."""
        now = time.monotonic()
        elapsed, self._last_look = min(self._most, now - self._last_look), now
        for worker, sign in signs.items():
            moved = self._seen.get(worker) != sign
            self._silent[worker] = 0.0 if moved else self._silent.get(worker, 0.0) + elapsed
            self._seen[worker] = sign

    def seconds(self, worker: int) -> float:
        return self._silent.get(worker, 0.0)

    def forgive(self, worker: int) -> None:
        self._silent[worker] = 0.0


def look_seconds(step_timeout: float) -> float:
    return min(LOOK_SECONDS, step_timeout / 10)


class Watch:
    """A thread that looks at the workers' pulses and ends those that hang; their death is then noticed as any other.

    `at_work` says what a worker is at: "starting", "busy" (it must show signs of life), or "waiting".
    """

    def __init__(
        self,
        settings: CollectorSettings,
        monitor: Monitor,
        coroner: Coroner,
        pids: Callable[[], Mapping[int, int]],
        at_work: Callable[[int], str],
    ):
        self._timeout = settings.step_timeout
        self._seed = settings.seed
        self._pulse, self._stacks = monitor.pulse, monitor.stacks
        self._coroner = coroner
        self._pids = pids
        self._at_work = at_work
        self._look_seconds = look_seconds(settings.step_timeout)
        self._silence = Silence(self._look_seconds)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freerun-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._look_seconds):
            self._coroner.look()
            pids = self._pids()
            states = {worker: self._at_work(worker) for worker in pids}
            beats = {worker: self._pulse.beats(worker) for worker in pids}
            self._silence.look({worker: (pid, states[worker], beats[worker]) for worker, pid in pids.items()})
            for worker, pid in pids.items():
                if self._silence.seconds(worker) >= self._timeout and not self._closing.is_set():
                    self._judge(worker, pid, states[worker])

    def _judge(self, worker: int, pid: int, state: str) -> None:
        seconds, stopped = self._silence.seconds(worker), is_stopped(pid)
        if state == "starting" and not stopped and seconds < START_SECONDS:
            return
        self._silence.forgive(worker)
        if not stopped and state not in ("starting", "busy"):
            return
        beats = self._pulse.beats(worker)
        with self._coroner.at_work:
            stack = "it was stopped by a signal" if stopped else f"its stack:\n{self._stacks.capture(pid)}"
            if self._pulse.beats(worker) != beats:
                return  # it has just gone on
            doing = "while it was starting" if state == "starting" else self._where(worker)
            failure = WorkerHung(
                f"worker {worker} showed no sign of life for {seconds:.1f} s {doing} (--step-timeout "
                f"{self._timeout:g}); {stack}"
            )
            failure.from_outside = stopped
            self._coroner.killed(pid, failure)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _where(self, worker: int) -> str:
        episode = self._pulse.episode(worker)
        if episode < 0:
            return "in a step"
        return f"in a step of episode {episode} (seed {episode_seed(self._seed, episode)})"


def thread_stack(ident: int | None) -> str:
    frame = sys._current_frames().get(ident or -1)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none: the thread has ended)"
