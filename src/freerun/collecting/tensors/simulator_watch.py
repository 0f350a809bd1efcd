"""Finds a simulator that hangs. It cannot be restarted, so the run ends with an error and with what was learned."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from freerun.collecting.workers.hang_detector import SilenceClock, look_seconds, thread_stack
from freerun.collecting.workers.restart_policy import RestartPolicy
from freerun.core import EnvFailure, WorkerHung
from freerun.transport.heartbeats import Heartbeat
from freerun.transport.signals import GRACE_SECONDS

FIRST_SECONDS = 600.0
"""The time limit of a simulator's first segment, in which it may compile kernels or load scenes."""
INTERRUPT_SECONDS = 1.0
"""An interrupt that was sent arrives within this time."""
AFTER_GRACE_SECONDS = 5.0
"""After the grace that an interrupted learner has to finish its update, the simulator's thread has this long to end."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, eq=False)
class _SegmentInProgress:
    """A segment that a thread is collecting now."""

    heartbeat: Heartbeat
    thread: int
    limit_seconds: float


class SimulatorWatch:
    """A thread that looks whether the simulators make steps while they should.

    If one makes no step for too long, the watch interrupts the simulator's thread as Ctrl-C would, and the hang is
    raised there. Python can interrupt only the main thread, and only between two of its instructions. If that does not
    help, for example because the simulator hangs in C++ code, the watch calls `when_stuck` from its own thread.
    """

    def __init__(self, step_timeout: float, restart_policy: RestartPolicy):
        self._timeout = step_timeout
        self._restart_policy = restart_policy
        self.when_stuck: Callable[[Exception], None] | None = None
        # Each entry is written by one thread and only read by others; a dict's single operations are atomic in CPython.
        self._in_progress: dict[int, _SegmentInProgress] = {}
        self._failures: dict[int, Exception] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freerun-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def over(self, worker: int, heartbeat: Heartbeat, is_first: bool) -> Iterator[None]:
        """Within this context, the calling thread makes steps with the simulator of that worker."""
        limit = max(self._timeout, FIRST_SECONDS) if is_first else self._timeout
        self._in_progress[worker] = _SegmentInProgress(heartbeat, threading.get_ident(), limit)
        try:
            yield
            if worker in self._failures:
                # The simulator has come back at the last moment, but the interrupt is on its way: take it here.
                time.sleep(INTERRUPT_SECONDS)
                raise self._failures[worker]
        except KeyboardInterrupt:
            if worker not in self._failures:  # it is the user's own Ctrl-C
                raise
            raise self._failures[worker] from None
        finally:
            del self._in_progress[worker]

    def close(self) -> None:
        self._closing.set()
        if self._thread is not threading.current_thread():  # `when_stuck` may close the collector from this thread
            self._thread.join()

    def _run(self) -> None:
        silence = SilenceClock(look_seconds(self._timeout))
        while not self._closing.wait(look_seconds(self._timeout)):
            in_progress = dict(self._in_progress)  # a copy: other threads change the original meanwhile
            # A new segment is a sign of life even if its heartbeat has not moved yet.
            silence.look({worker: (segment, segment.heartbeat.num_beats) for worker, segment in in_progress.items()})
            for worker, segment in in_progress.items():
                if silence.seconds(worker) >= segment.limit_seconds:
                    self._end(worker, segment, silence.seconds(worker))
                    return

    def _end(self, worker: int, segment: _SegmentInProgress, seconds: float) -> None:
        failure: Exception = WorkerHung(
            f"the simulator has made no step for {seconds:.1f} s (--step-timeout {self._timeout:g}); its stack:\n"
            f"{thread_stack(segment.thread)}"
        )
        try:
            self._restart_policy.failed(worker, failure)
        except EnvFailure as end:
            failure = end
        # Before the interrupt is sent: the interrupted thread looks here to tell it from the user's Ctrl-C.
        self._failures[worker] = failure
        if segment.thread == threading.main_thread().ident:
            signal.pthread_kill(segment.thread, signal.SIGINT)
            deadline = time.monotonic() + GRACE_SECONDS + AFTER_GRACE_SECONDS
            while worker in self._in_progress and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if worker in self._in_progress and self.when_stuck is not None:
            self.when_stuck(failure)
