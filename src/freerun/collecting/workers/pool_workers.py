"""Workers in a `ProcessPoolExecutor`: each holds some of the pool's tasks, and any process may run any of them."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from freerun.collecting.workers.hang_detector import Activity, SignOfLife
from freerun.collecting.workers.worker import Worker, WorkerSetup, describe_failure
from freerun.collecting.workers.worker_handle import (
    Report,
    UnitFailed,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import EnvFailure, FloatArray, Segment, WorkerHung
from freerun.transport import processes
from freerun.transport.exit_diagnosis import ExitDiagnosis, is_alive, is_stopped
from freerun.transport.heartbeats import NO_EPISODE

Result = TypeVar("Result")

CLOSE_SECONDS = 1.0
LOOK_SECONDS = 1.0
"""The time between two looks for a process that has died without the pool noticing."""
JOIN_SECONDS = 30.0
"""A killed process is gone in milliseconds, or in seconds on a machine with far too much to do."""
INDEX_BYTES = 4


@dataclass(frozen=True)
class TaskResult:
    """What a task returns. A failure is returned, not raised, so that it comes with the index of its process."""

    worker: int
    segment: Segment | None = None
    failure: Exception | None = None


class PoolTaskHandle(WorkerHandle):
    """The tasks of one worker. Its index also names one process of the pool, for heartbeats and diagnoses."""

    def __init__(self, index: int, place: PoolProcesses):
        super().__init__(index)
        self._place = place

    def grant(self, unit: int) -> None:
        self._place.submit_episode(self, unit)

    def retire(self) -> None:
        self._place.remove(self)

    def suspect_episode(self) -> int | None:
        return self.episode()

    def activity(self) -> Activity:
        """A process that plays an episode is busy, whichever worker that was granted to."""
        if not self._place.is_open:
            return Activity.STARTING
        return Activity.WAITING if self.episode() is None else Activity.BUSY

    def sign_of_life(self) -> SignOfLife:
        return SignOfLife(self._pid(), self.activity(), self._place.heartbeats.num_beats(self.index))

    def episode(self) -> int | None:
        episode = self._place.heartbeats.episode(self.index)
        return episode if episode >= 0 else None

    def _pid(self) -> int:
        return self._place.pids().get(self.index, 0)

    def has_place(self) -> bool:
        return bool(self._pid())

    def is_stopped(self) -> bool:
        return bool(self._pid()) and is_stopped(self._pid())

    def stack(self) -> str:
        return self._place.stacks.capture(self._pid())

    def end_hung(self, failure: WorkerHung) -> None:
        """Kill the process, which breaks the pool. The diagnosis then names this failure as the cause."""
        if pid := self._pid():
            # The reason first, because the death is noticed right after the kill.
            self._place.diagnosis.record_kill(pid, failure)
            processes.kill(pid)


class PoolProcesses(WorkerPlace):
    """A pool of processes. One dead process breaks the whole pool: what had arrived is kept, and all start anew."""

    starts_together = True

    def __init__(self, setup: WorkerSetup, num_workers: int):
        self._setup = setup
        self._num_workers = num_workers  # what the fleet wants
        self._context = processes.context()
        self.heartbeats, self.stacks = setup.monitor.heartbeats, setup.monitor.stacks
        self.diagnosis = ExitDiagnosis()
        self.ending_lock = self.diagnosis.kill_lock
        self.is_open = False
        """All processes of the pool have started."""
        self._size = 0  # processes of the pool
        self._is_draining = False
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._handles: list[PoolTaskHandle] = []
        self._tasks: dict[Future[TaskResult], tuple[PoolTaskHandle, int]] = {}
        # Futures that are done, from the pool's own thread; None only wakes the fleet's thread up.
        self._done: SimpleQueue[Future[TaskResult] | None] = SimpleQueue()
        self._found_dead: set[int] = set()  # processes, at the last look
        self._ended_here: set[int] = set()  # processes of a broken pool that were killed to get rid of them

    def start(self, index: int) -> PoolTaskHandle:
        """Add a worker to the pool that `wait` opens next."""
        handle = PoolTaskHandle(index, self)
        self._handles.append(handle)
        return handle

    def resize(self, num_workers: int) -> None:
        """The size of a pool is fixed, so another one takes its place when its tasks are done."""
        self._num_workers = num_workers
        self._mark_outdated()

    def _mark_outdated(self) -> None:
        """A pool that has begun to lose its workers is never filled again."""
        for handle in self._handles:
            handle.is_outdated = self._is_draining or self._size != self._num_workers

    def remove(self, handle: PoolTaskHandle) -> None:
        self._handles.remove(handle)
        self._is_draining = True
        self._mark_outdated()
        if not self._handles:
            self._shut_down(CLOSE_SECONDS)

    def publish(self, weights: FloatArray, version: int) -> None:
        self._setup.board.publish(weights, version)

    def wake(self) -> None:
        self._done.put(None)

    def num_step_calls(self) -> int:
        return self.heartbeats.total_beats

    def before_look(self) -> None:
        self.diagnosis.refresh()

    def pids(self) -> dict[int, int]:
        """Return the process ids by worker. A process that has not said which one it is gets a place that is free."""
        num_processes = len(self._processes)
        known = {index: pid for index in range(num_processes) if (pid := self.heartbeats.pid(index))}
        others = [process.pid for process in list(self._processes) if process.pid not in known.values()]
        places = [index for index in range(num_processes) if index not in known]
        return known | {index: pid for index, pid in zip(places, others, strict=False) if pid is not None}

    def submit_episode(self, handle: PoolTaskHandle, unit: int) -> None:
        try:
            future = self._submit(_run_episode, unit)
        except BrokenProcessPool as broken:  # `wait` finds it as it finds a task that was lost
            future = Future()
            future.set_exception(broken)
        self._tasks[future] = handle, unit
        future.add_done_callback(self._done.put)  # in the pool's own thread, or here if the future is done already

    # ------------------------------------------------------------------------------------------ waiting

    def wait(self, seconds: float | None) -> list[Report]:
        if self._pool is None and self._handles:
            return self._open()
        has_tasks = bool(self._tasks)
        if has_tasks:  # the pool may be broken without noticing it
            seconds = LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
        reports: list[Report] = []
        try:
            reports += self._report(self._done.get(timeout=seconds))
            while True:
                reports += self._report(self._done.get_nowait())
        except Empty:
            if has_tasks and not reports:
                self._break_stuck_pool()
        except BrokenProcessPool:
            reports += self._end_broken()
        return reports

    def _report(self, future: Future[TaskResult] | None) -> list[Report]:
        if future is None or future not in self._tasks:  # only a wake-up, or a task of an earlier pool
            return []
        handle, unit = self._tasks[future]
        result = future.result()
        del self._tasks[future]
        if result.segment is not None:
            return [UnitFinished(handle, unit, result.segment)]
        assert result.failure is not None
        return [UnitFailed(handle, unit, result.failure, result.worker)]

    # ------------------------------------------------------------------------------------------ opening a pool

    def _open(self) -> list[Report]:
        """Start a pool for the workers that are there, and wait until all of its processes are ready."""
        size = self._size = len(self._handles)
        self._is_draining = False
        self._mark_outdated()
        # A pool starts a process only when none is idle: nobody is idle until all have met at this barrier.
        # Its semaphores lose their names when all processes have opened them, so that a kill leaves none behind.
        with processes.nameless_semaphores():
            all_started = self._context.Barrier(size)
            indices, giver = self._context.Pipe(duplex=False)
            os.write(giver.fileno(), b"".join(index.to_bytes(INDEX_BYTES) for index in range(size)))
            for index in range(size):
                self.heartbeats.clear(index)
            self._pool = ProcessPoolExecutor(size, self._context, _start_process, (self._setup, all_started, indices))
            # All processes start at once, before the pool's own thread watches them: that thread does not bear a
            # process being started while it ends the others. Where Python has no such switch, `_submit` helps.
            self._pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
            try:
                return self._greet(size)
            except BrokenProcessPool:
                return self._end_broken()
            finally:
                indices.close()
                giver.close()

    def _greet(self, size: int) -> list[Report]:
        pool: Any = self._pool
        try:
            # One task more than there are processes: each starts one, but only the next one tells the pool to watch
            # it. Otherwise the death of the last would go unnoticed, and the others would wait for it.
            greetings = [self._submit(_greet) for _ in range(size + 1)]
        finally:
            self._processes = list((pool._processes or {}).values())
        for greeting in greetings:
            result = greeting.result()
            if result.failure is not None:
                self._shut_down()
                return self._lose_all({result.worker: result.failure})
        self.is_open = True
        return [WorkerReady(handle) for handle in self._handles]

    def _submit(self, function: Callable[..., Result], *arguments: int) -> Future[Result]:
        """Submit a task. A pool that breaks may start the missing process with a pipe that it has closed."""
        if self._pool is None:
            raise BrokenProcessPool("it has ended")
        with processes.without_main():
            try:
                return self._pool.submit(function, *arguments)
            except OSError as error:
                if error.errno is not None:  # the system refused something
                    raise
                raise BrokenProcessPool("it broke while it started a process") from error

    # ------------------------------------------------------------------------------------------ a pool that broke

    def _break_stuck_pool(self) -> None:
        """End a pool that one of its processes has broken without the pool noticing.

        All processes write to one pipe. When one is killed in the middle of a message, the pool's own thread waits for
        the rest of it for ever, because others keep the pipe open. Once all have closed it, that thread reads its end,
        and finds the pool broken as usual.
        """
        pids = {process.pid for process in self._processes if process.pid is not None}
        dead = {pid for pid in pids if not is_alive(pid)}
        if dead & self._found_dead:  # the pool's thread has had time to find it out by itself
            self._kill(pids - dead)
            pool: Any = self._pool
            pool._result_queue._writer.close()  # this process could write to it, too
        self._found_dead = dead

    def _kill(self, pids: set[int]) -> None:
        """Kill processes that had no part in what broke the pool."""
        self._ended_here |= pids
        for pid in pids:
            processes.kill(pid)

    def _end_broken(self) -> list[Report]:
        """End a broken pool; report what had arrived, and that all workers are lost, with the failures of the dead."""
        self._wait_for_pool()
        reports: list[Report] = []
        for future in list(self._tasks):
            if future.done() and not future.cancelled() and future.exception() is None:
                reports += self._report(future)
        workers = {pid: index for index, pid in self.pids().items()}
        # The pool itself ends the others with SIGTERM.
        dead = {
            workers.get(process.pid or -1, 0): process
            for process in self._processes
            if process.pid not in self._ended_here and process.exitcode not in (None, -signal.SIGTERM)
        }
        self._shut_down()
        failures: dict[int, Exception] = {
            worker: self.diagnosis.diagnose(worker, process.pid, process.exitcode) for worker, process in dead.items()
        }
        return reports + self._lose_all(failures or {0: EnvFailure("the process pool broke, nobody knows why")})

    def _lose_all(self, failures: dict[int, Exception]) -> list[Report]:
        handles, self._handles, self._tasks = self._handles, [], {}
        return [WorkerLost(handle, failures.get(handle.index)) for handle in handles]

    def _wait_for_pool(self) -> None:
        """Wait until the pool's own thread has ended all processes.

        That thread reads exit codes too. Of two threads that read one at the same time the second gets 255, which would
        look like a failure of the environment. So nobody may ask for an exit code before.
        """
        manager: Any = self._pool._executor_manager_thread if self._pool is not None else None
        if manager is None:
            return
        manager.join(CLOSE_SECONDS)
        if manager.is_alive():
            # On a busy machine they have not got round to ending, or a signal has stopped them. Those that are dead
            # already, and whose exit code nobody has read, are not alive here.
            self._kill({process.pid for process in self._processes if process.pid and is_alive(process.pid)})
            manager.join(JOIN_SECONDS)

    # ------------------------------------------------------------------------------------------ the end

    def _shut_down(self, grace_seconds: float = 0.0) -> None:
        self.is_open = False
        pool: Any = self._pool
        self._pool = None
        manager = results = None
        if pool is not None:
            manager, results = pool._executor_manager_thread, pool._result_queue
            pool.shutdown(wait=False, cancel_futures=True)  # it forgets both
        processes.stop(self._processes, grace_seconds)
        if manager is not None and results is not None:
            manager.join(CLOSE_SECONDS)
            if manager.is_alive():  # it waits for the rest of a message, as in `_break_stuck_pool`, and Python for it
                results._writer.close()
        self._processes = []
        self._found_dead, self._ended_here = set(), set()

    def abort(self) -> None:
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        self._shut_down(CLOSE_SECONDS)
        self._setup.monitor.close()


# ---------------------------------------------------------------------------------------------- in the processes

# A pool gives its processes no object of their own, so what they keep between tasks lies in module variables.
_setup: WorkerSetup | None = None
_index = -1
_worker: Worker | None = None
_start_failure: Exception | None = None


def _start_process(setup: WorkerSetup, all_started: Barrier, indices: Connection) -> None:
    """Initialise a process. An initialiser that raises would only break the pool, so `_greet` returns its failure."""
    global _setup, _index, _start_failure
    _setup = setup
    # The kernel locks a pipe for each read, so every process takes one whole index that no other has.
    _index = int.from_bytes(os.read(indices.fileno(), INDEX_BYTES))
    setup.monitor.heartbeats.writer(_index).set_pid(os.getpid())
    try:
        _get_worker()
    except Exception as failure:
        _start_failure = failure
    all_started.wait()


def _get_worker() -> Worker:
    global _worker
    if _worker is None:
        assert _setup is not None
        _worker = Worker(_setup, _index)
    return _worker


def _greet() -> TaskResult:
    """Answer once the process has started."""
    return TaskResult(_index, failure=None if _start_failure is None else describe_failure(_start_failure))


def _run_episode(number: int) -> TaskResult:
    """Play an episode. After a failure the next one begins with new environments."""
    global _worker
    try:
        return TaskResult(_index, _get_worker().run_episode(number))
    except Exception as failure:
        if _worker is not None:
            worker, _worker = _worker, None
            worker.rollout.heartbeat.begin_episode(NO_EPISODE)  # it has nothing to do now, so it may be silent
            worker.close()
        return TaskResult(_index, failure=describe_failure(failure))
