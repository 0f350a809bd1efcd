"""Workers in threads of the learner's process, for environments that release Python's lock while they step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from freerun.collecting.rollouts.episode_numbers import next_from, worker_episode_numbers
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.collecting.scheduling.episode_accounting import EpisodeAccounting
from freerun.collecting.workers.hang_detector import SignOfLife, thread_stack
from freerun.collecting.workers.worker import make_rollout, reporting
from freerun.collecting.workers.worker_handle import (
    Report,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import CollectorSettings, EnvFactory, EnvFailure, FloatArray, Policy, State, WorkerHung
from freerun.transport.heartbeats import Heartbeat

CLOSE_SECONDS = 1.0


class ThreadHandle(WorkerHandle):
    """A worker in a thread. A thread cannot be ended: one that hangs is abandoned, and what it brings is ignored."""

    def __init__(self, index: int, place: WorkerThreads, first_episode: int, stride: int):
        super().__init__(index)
        self.inbox: SimpleQueue[int | None] = SimpleQueue()
        """Granted units; None ends the thread."""
        self.heartbeat = Heartbeat()
        self.begun = [first_episode - stride]
        """The last episode that it has begun. It belongs to this handle, so an abandoned thread disturbs no other."""
        self.is_abandoned = False
        self._place = place
        name = f"freerun-collector-{index}"
        self.thread = threading.Thread(target=place.play, args=(self,), name=name, daemon=True)

    def grant(self, unit: int) -> None:
        self.inbox.put(unit)

    def retire(self) -> None:
        self._place.remove(self)
        self.inbox.put(None)

    def last_begun_episode(self) -> int | None:
        return self.begun[0]

    def sign_of_life(self) -> SignOfLife:
        return SignOfLife(self.thread.ident, self.activity(), self.heartbeat.num_beats)

    def episode(self) -> int | None:
        return self.heartbeat.episode if self.heartbeat.episode >= 0 else None

    def stack(self) -> str:
        return thread_stack(self.thread.ident)

    def end_hung(self, failure: WorkerHung) -> None:
        self.is_abandoned = True
        self.inbox.put(None)  # should it ever come back
        self._place.reports.put(WorkerLost(self, failure))


class WorkerThreads(WorkerPlace):
    """One thread per worker, with its own environments and its own copy of the policy. It plays segments."""

    def __init__(
        self,
        factory: EnvFactory,
        policy: Policy,
        settings: CollectorSettings,
        envs_per_worker: int,
        segment_steps: int,
        accounting: EpisodeAccounting,
    ):
        own_policy = copy.deepcopy(policy)  # the learner goes on with the other
        self._make_rollout: Callable[[], Rollout | SingleEnvRollout] = lambda: make_rollout(
            factory, copy.deepcopy(own_policy), settings.seed, envs_per_worker
        )
        self.segment_steps = segment_steps
        """The steps of segments that begin from now on."""
        self.reports: SimpleQueue[Report | None] = SimpleQueue()
        """What the threads report; None only wakes the fleet's thread up."""
        self._accounting = accounting
        self._stride = settings.max_workers
        self._tracks = settings.tracks
        self._handles: list[ThreadHandle] = []
        self._threads: list[threading.Thread] = []  # all that were started and may still run
        self._lost_beats = 0  # those of workers that are gone
        self._newest: tuple[FloatArray, int] | None = None
        self._is_published = threading.Event()  # there are weights, or there never will be
        self._is_closing = False

    def start(self, index: int) -> ThreadHandle:
        handle = ThreadHandle(index, self, self._accounting.next_episode(index), self._stride)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(handle.thread)
        self._handles.append(handle)
        handle.thread.start()
        return handle

    def wait(self, seconds: float | None) -> list[Report]:
        reports: list[Report] = []
        try:
            self._add(reports, self.reports.get(timeout=seconds))
            while True:
                self._add(reports, self.reports.get_nowait())
        except Empty:
            return reports

    def _add(self, reports: list[Report], report: Report | None) -> None:
        """Leave out what comes from a worker that is lost."""
        if report is None or report.worker not in self._handles:
            return
        reports.append(report)
        if isinstance(report, WorkerLost):
            self.remove(report.worker)

    def remove(self, worker: WorkerHandle) -> None:
        """Ignore a worker from now on."""
        handle = next(handle for handle in self._handles if handle is worker)
        self._handles.remove(handle)
        self._lost_beats += handle.heartbeat.num_beats

    def wake(self) -> None:
        self.reports.put(None)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._newest = (weights.copy(), version)  # one assignment, so that a thread never sees half of it
        self._is_published.set()

    def num_step_calls(self) -> int:
        return self._lost_beats + sum(handle.heartbeat.num_beats for handle in list(self._handles))

    def close(self) -> None:
        self._is_closing = True
        # A thread may still wait for the first weights. It looks at `_is_closing` next, which is set by now.
        self._is_published.set()
        for handle in self._handles:
            handle.inbox.put(None)
        # One deadline for all. A thread that is stuck cannot be ended; it is a daemon, so the process need not wait.
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ a worker's thread

    def play(self, handle: ThreadHandle) -> None:
        """Play what is granted until the inbox says that it is over, or something fails."""
        with reporting(lambda failure: self.reports.put(WorkerLost(handle, failure))):
            try:
                self._play(handle)
            except SystemExit as exit_:  # it would end a process, but this thread without a word
                raise EnvFailure(f"the environment called sys.exit({exit_.code!r})") from None

    def _play(self, handle: ThreadHandle) -> None:
        rollout = self._make_rollout()
        rollout.heartbeat = handle.heartbeat
        try:
            self.reports.put(WorkerReady(handle))
            segments = rollout.segments(
                lambda: self.segment_steps, next_from(worker_episode_numbers(handle.begun, 0, self._stride))
            )
            version = -1
            while (unit := self._next_unit(handle)) is not None:
                self._tracks.set_state(handle.index, State.BUSY)
                version = self._refresh(rollout, version)
                segment = next(segments).copy()  # its arrays are overwritten by the next one
                self.reports.put(UnitFinished(handle, unit, segment))
        finally:
            rollout.close()

    def _next_unit(self, handle: ThreadHandle) -> int | None:
        if handle.inbox.empty():
            self._tracks.set_state(handle.index, State.WAITING_FOR_SLOT)
        unit = handle.inbox.get()
        self._is_published.wait()
        return None if self._is_closing or handle.is_abandoned else unit

    def _refresh(self, rollout: Rollout | SingleEnvRollout, version: int) -> int:
        """Load the newest weights if they have changed; return their version."""
        assert self._newest is not None
        weights, newest = self._newest
        if newest != version:
            rollout.load(weights, newest)
        return newest
