"""A simulator that hangs: nobody can start it again, but its run can end with a word and with what was learned."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from freerun.collectors.supervision import Silence, Supervisor, look_seconds, thread_stack
from freerun.core import EnvFailure, WorkerHung
from freerun.transport.pulse import Vitals
from freerun.transport.signals import GRACE_SECONDS

FIRST_SECONDS = 600.0
"""A simulator's first steps may compile it, or load what it draws."""


@dataclass(frozen=True, eq=False)
class Watched:
    """A segment that is being played."""

    vitals: Vitals
    thread: int
    limit_seconds: float


class SimulatorWatch:
    """A thread that looks whether steps are made while they should be.

    When none is for too long it interrupts the simulator's thread, as Ctrl-C would, and the hang is raised there. Only
    the main thread can be interrupted, and only while it runs Python: else `when_stuck` is called, from here.
    """

    def __init__(self, step_timeout: float, supervisor: Supervisor):
        self._timeout = step_timeout
        self._supervisor = supervisor
        self.when_stuck: Callable[[Exception], None] | None = None
        self._watched: dict[int, Watched] = {}
        self._hung: dict[int, Exception] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freerun-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def over(self, place: int, vitals: Vitals, is_first: bool) -> Iterator[None]:
        """Within it, this thread makes steps with the simulator of that place."""
        limit = max(self._timeout, FIRST_SECONDS) if is_first else self._timeout
        self._watched[place] = Watched(vitals, threading.get_ident(), limit)
        try:
            yield
            if place in self._hung:  # it has come back at the last moment: what interrupts it is on its way
                time.sleep(1.0)
                raise self._hung[place]
        except KeyboardInterrupt:
            if place not in self._hung:
                raise
            raise self._hung[place] from None
        finally:
            del self._watched[place]

    def close(self) -> None:
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        silence = Silence(look_seconds(self._timeout))
        while not self._closing.wait(look_seconds(self._timeout)):
            watched = dict(self._watched)
            silence.look({place: (id(each), each.vitals.beats) for place, each in watched.items()})
            for place, each in watched.items():
                if silence.seconds(place) >= each.limit_seconds:
                    self._end(place, each, silence.seconds(place))
                    return

    def _end(self, place: int, watched: Watched, seconds: float) -> None:
        failure: Exception = WorkerHung(
            f"the simulator has made no step for {seconds:.1f} s (--step-timeout {self._timeout:g}); its stack:\n"
            f"{thread_stack(watched.thread)}"
        )
        try:
            self._supervisor.failed(place, failure)
        except EnvFailure as end:
            failure = end
        self._hung[place] = failure
        if watched.thread == threading.main_thread().ident:
            signal.pthread_kill(watched.thread, signal.SIGINT)
            deadline = time.monotonic() + GRACE_SECONDS + 5.0  # it may let an update finish
            while place in self._watched and time.monotonic() < deadline:
                time.sleep(0.05)
        if place in self._watched and self.when_stuck is not None:
            self.when_stuck(failure)
