"""Finds workers that show no sign of life for longer than `--step-timeout`, and has them ended."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from freerun.core import CollectorSettings, RunSeed, WorkerHung, episode_seed
from freerun.transport.processes import START_SECONDS

MAX_LOOK_SECONDS = 0.25
MAX_LOOKS_COUNTED = 4
"""Time between two looks counts as silence up to this many intervals: see `SilenceClock`."""


def look_seconds(step_timeout: float) -> float:
    """The time between two looks: short enough to notice a short timeout early."""
    return min(MAX_LOOK_SECONDS, step_timeout / 10)


class Activity(Enum):
    """What a worker is doing, as far as the detector must know."""

    STARTING = "starting"
    """It builds its environments, which may take up to START_SECONDS."""
    BUSY = "busy"
    """It plays a unit, so it must show signs of life."""
    WAITING = "waiting"
    """It has nothing to do, so it may be silent."""


class SignOfLife(NamedTuple):
    """A worker's state at one look. A worker is silent while this stays the same."""

    identity: object
    """Its process id or another name of its own: a successor must not inherit the silence."""
    activity: Activity
    num_beats: int
    """Steps and resets that it has begun so far."""


class WatchedWorker(Protocol):
    """A worker as the hang detector sees it."""

    index: int

    def sign_of_life(self) -> SignOfLife: ...

    def episode(self) -> int | None:
        """Return the episode that it began last, if that is known."""
        ...

    def is_stopped(self) -> bool:
        """True when a signal has stopped its process, as an operator could."""
        ...

    def has_place(self) -> bool:
        """False while it has not even been given a process, so that it cannot hang."""
        ...

    def stack(self) -> str: ...

    def note_slow_start(self) -> None:
        """React to a start that takes longer than a step may take. It is no failure yet."""
        ...

    def end_hung(self, failure: WorkerHung) -> None:
        """End the worker for this reason."""
        ...


class SilenceClock:
    """Counts how long each worker has been silent, but only while somebody was looking.

    A learner that was stopped or starved itself must not find all of its workers dead when it goes on. So at most a
    few intervals are counted between two looks.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._max_counted_seconds = MAX_LOOKS_COUNTED * interval_seconds
        self._last_look = time.monotonic()
        self._last_signs: dict[int, object] = {}
        self._silent_seconds: dict[int, float] = {}

    def look(self, signs: Mapping[int, object]) -> None:
        """Compare each worker's sign of life with that of the last look."""
        now = time.monotonic()
        elapsed, self._last_look = min(self._max_counted_seconds, now - self._last_look), now
        for worker, sign in signs.items():
            moved = self._last_signs.get(worker) != sign
            self._silent_seconds[worker] = 0.0 if moved else self._silent_seconds.get(worker, 0.0) + elapsed
            self._last_signs[worker] = sign

    def seconds(self, worker: int) -> float:
        return self._silent_seconds.get(worker, 0.0)

    def restart(self, worker: int) -> None:
        """Begin to count anew."""
        self._silent_seconds[worker] = 0.0


class HangDetector:
    """A thread that looks at the workers now and then and ends those that hang.

    It has a thread of its own because every other thread may wait for the very worker that hangs. `lock` is held while
    a worker is examined and ended, for those who want to know what it died of.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        workers: Callable[[], Iterable[WatchedWorker]],
        interval_seconds: float | None = None,
        lock: threading.Lock | None = None,
        before_look: Callable[[], None] = lambda: None,
    ):
        self._timeout = settings.step_timeout
        self._run_seed: RunSeed = settings.seed
        self._workers = workers
        self._interval = look_seconds(settings.step_timeout) if interval_seconds is None else interval_seconds
        self._lock = threading.Lock() if lock is None else lock
        self._before_look = before_look
        self._silence = SilenceClock(self._interval)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freerun-hang-detector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            self.look()

    def look(self) -> None:
        """Look at all workers once and end those that hang."""
        self._before_look()
        workers = list(self._workers())
        signs = {worker.index: worker.sign_of_life() for worker in workers}
        self._silence.look(signs)
        for worker in workers:
            if self._silence.seconds(worker.index) >= self._timeout and not self._closing.is_set():
                self._judge(worker, signs[worker.index])

    def _judge(self, worker: WatchedWorker, sign: SignOfLife) -> None:
        """Decide whether a worker that was silent for the timeout hangs, and end it if so."""
        seconds, is_stopped = self._silence.seconds(worker.index), worker.is_stopped()
        is_starting = sign.activity is Activity.STARTING
        if is_starting and not is_stopped and (seconds < START_SECONDS or not worker.has_place()):
            worker.note_slow_start()
            return
        # One that only waits, or that goes on after all, has the whole timeout again.
        self._silence.restart(worker.index)
        if sign.activity is Activity.WAITING and not is_stopped:
            return
        # Whoever diagnoses the worker's death waits for this lock, so it finds the reason noted (see `ExitDiagnosis`).
        with self._lock:
            stack = "it was stopped by a signal" if is_stopped else f"its stack:\n{worker.stack()}"
            if worker.sign_of_life().num_beats != sign.num_beats:
                return  # it has gone on while its stack was taken
            doing = "while it was starting" if is_starting else self._where(worker)
            failure = WorkerHung(
                f"worker {worker.index} showed no sign of life for {seconds:.1f} s {doing} (--step-timeout "
                f"{self._timeout:g}); {stack}"
            )
            failure.from_outside = is_stopped
            worker.end_hung(failure)

    def _where(self, worker: WatchedWorker) -> str:
        episode = worker.episode()
        if episode is None:
            return "in a step"
        return f"in a step of episode {episode} (seed {episode_seed(self._run_seed, episode)})"


def thread_stack(thread_id: int | None) -> str:
    """Return the Python stack of a thread of this process."""
    frame = sys._current_frames().get(thread_id or -1)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(none: the thread has ended)"
