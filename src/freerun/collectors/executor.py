"""`executor`: a ProcessPoolExecutor whose processes keep environment and policy warm; `as_completed` hands over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, TypeVar

from freerun.collectors.rounds import Rounds
from freerun.collectors.supervision import Supervisor, Watch
from freerun.collectors.worker import Monitor, Worker, WorkerSetup
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    Dial,
    EnvFactory,
    EnvFailure,
    FloatArray,
    NotFinite,
    Policy,
    Segment,
    Start,
    State,
    UserError,
)
from freerun.transport import processes
from freerun.transport.deaths import Coroner
from freerun.transport.weights import WeightsBoard

Result = TypeVar("Result")

CLOSE_SECONDS = 1.0
INDEX_BYTES = 4


class Executor:
    """One dead process breaks the whole pool: what had arrived is kept, the rest is run again in a new one."""

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        self._context = processes.context()
        self.num_workers = settings.num_workers
        self._rounds = Rounds(settings.max_lag, start=settings.start)
        self._tracks = settings.tracks
        self._board = WeightsBoard(self._context, policy.weights.size)
        self._most_workers = settings.most_workers
        self._wanted = self.num_workers  # from the next round on
        self._monitor = Monitor(self._most_workers)
        self._setup = WorkerSetup.pack(factory, policy, self._board, self._monitor, settings)
        self._supervisor = Supervisor(settings)
        self._coroner = Coroner()
        self._futures: dict[int, Future[tuple[int, Segment]]] = {}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._is_ready = False
        self._watch = Watch(settings, self._monitor, self._coroner, self._pids, self._state_of)
        self._watch.start()
        try:
            self._start_pool()
        except BaseException:
            self.close()
            raise

    def _start_pool(self) -> None:
        """Until it stands, or has broken too often."""
        while not self._is_ready:
            with processes.nameless_semaphores():
                self._try_pool()

    def _try_pool(self) -> None:
        others = set(multiprocessing.active_children())
        # A pool starts a process only when none is idle: nobody is idle until all have met here.
        all_started = self._context.Barrier(self.num_workers)
        indices, giver = self._context.Pipe(duplex=False)
        os.write(giver.fileno(), b"".join(index.to_bytes(INDEX_BYTES) for index in range(self.num_workers)))
        for index in range(self.num_workers):
            self._monitor.pulse.clear(index)
        arguments = (self._setup, all_started, indices)
        self._pool = ProcessPoolExecutor(self.num_workers, self._context, _start, arguments)
        # All processes at once, before the pool's own thread watches them: that thread does not bear a process being
        # started while it ends the others. Where Python has no such switch, `_submit` makes the best of it.
        self._pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
        try:
            try:
                # One more than there are processes: each starts one, but only the next tells the pool to watch it.
                # The death of the last would go unnoticed, and the others would wait for it.
                hellos = [self._submit(_hello) for _ in range(self.num_workers + 1)]
            finally:
                self._processes = [child for child in multiprocessing.active_children() if child not in others]
            for hello in hellos:
                hello.result()
            self._is_ready = True
        except BrokenProcessPool:
            self._end_pool()
        except (UserError, EnvFailure) as failure:
            self._shut_down()
            time.sleep(self._supervisor.failed(getattr(failure, "worker", 0), failure))
            self._rounds.book.worker_restarts += 1
        finally:
            indices.close()
            giver.close()

    def _pids(self) -> dict[int, int]:
        """Those that have said which one they are, and in the other places those that have not come so far."""
        known = {index: pid for index in range(self.num_workers) if (pid := self._monitor.pulse.pid(index))}
        others = [process.pid for process in list(self._processes) if process.pid not in known.values()]
        places = [index for index in range(self.num_workers) if index not in known]
        return known | {index: pid for index, pid in zip(places, others, strict=False) if pid is not None}

    def _state_of(self, worker: int) -> str:
        if not self._is_ready:
            return "starting"
        return "busy" if self._monitor.pulse.episode(worker) >= 0 else "waiting"

    def counts(self) -> Counts:
        return self._rounds.counts()

    def publish(self, weights: FloatArray, version: int) -> None:
        self._board.publish(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if not demand:
            self._finish_arrived()
            return self._rounds.take_arrived()
        if self._wanted != self.num_workers:
            self._resize()
        self._rounds.open(demand)
        while (segments := self._rounds.take()) is None:
            try:
                self._submit_granted()
                for future in as_completed([self._futures[number] for number in self._rounds.missing]):
                    self._finish(future)
            except BrokenProcessPool:
                self._rebuild()
        return segments

    def dials(self) -> list[Dial]:
        """The size of a pool is fixed: between two rounds another takes its place."""
        if self._most_workers == 1:
            return []
        most, is_settled = float(self._most_workers), lambda: self._wanted == self.num_workers
        return [Dial("num_workers", lambda: self._wanted, self._turn_workers, 1.0, most, is_settled=is_settled)]

    def _turn_workers(self, value: float) -> None:
        self._wanted = int(value)

    def _resize(self) -> None:
        """What has begun is finished first, the rest moves to the new pool: no episode is lost, none runs twice."""
        try:
            waiting = [number for number, future in self._futures.items() if future.cancel()]
            for number in waiting:
                del self._futures[number]
            while self._futures:  # one that fails is run again
                self._finish(next(iter(self._futures.values())))
        except BrokenProcessPool:
            self._rebuild()
            return  # and again before the next round
        finally:
            self._rounds.put_back(waiting)
        self._is_ready = False
        self._shut_down(CLOSE_SECONDS)
        for worker in range(self._wanted, self.num_workers):
            self._tracks.enter(worker, State.PARKED)
            self._monitor.pulse.clear(worker)
        self.num_workers = self._wanted
        self._start_pool()

    def _submit_granted(self) -> None:
        while self._start_next():
            pass

    def _start_next(self) -> bool:
        """Whether there was an episode that may start."""
        number = self._rounds.next()
        if number is None:
            return False
        try:
            self._futures[number] = self._submit(_run_episode, number)
        except BrokenProcessPool:
            self._rounds.lost(number)
            raise
        return True

    def _submit(self, function: Callable[..., Result], *arguments: int) -> Future[Result]:
        """The pool starts a missing process when it is given work; while it breaks, with a pipe that it has closed."""
        with processes.without_main():
            try:
                return self._pool.submit(function, *arguments)
            except OSError as error:
                if error.errno is not None:  # the system refused something
                    raise
                raise BrokenProcessPool("it broke while it started a process") from error

    def _finish(self, future: Future[tuple[int, Segment]]) -> None:
        """Take what a worker has returned; an episode that failed there is run again."""
        number = next(number for number, other in self._futures.items() if other is future)
        try:
            worker, segment = future.result()
        except (UserError, EnvFailure) as failure:
            del self._futures[number]
            self._retry(number, failure)
            return
        del self._futures[number]
        self._rounds.finish(number, segment)
        self._supervisor.delivered(worker)

    def _retry(self, number: int, failure: Exception) -> None:
        rest_seconds = self._supervisor.failed(getattr(failure, "worker", 0), failure, [number])
        self._rounds.book.worker_restarts += 1
        if isinstance(failure, NotFinite):
            self._rounds.book.segments_rejected += 1
            self._rounds.give_up(number)
            return
        self._rounds.lost(number)
        time.sleep(rest_seconds)
        self._start_next()

    def _finish_arrived(self) -> None:
        try:
            for future in [future for future in self._futures.values() if future.done()]:
                self._finish(future)
        except BrokenProcessPool:
            self._rebuild()

    def _rebuild(self) -> None:
        for number, future in list(self._futures.items()):
            if future.done() and not future.cancelled() and future.exception() is None:
                self._finish(future)
            else:
                del self._futures[number]
                self._rounds.lost(number)
        self._end_pool()
        self._start_pool()

    def _end_pool(self) -> None:
        """Tell of those who died (the pool itself ends the others with SIGTERM), and rest."""
        # The pool's own thread reads exit codes too; of two who read one at the same time, the second gets 255.
        manager: Any = self._pool._executor_manager_thread
        if manager is not None:
            manager.join(CLOSE_SECONDS)
        places = {pid: index for index, pid in self._pids().items()}
        dead = {
            places.get(process.pid or -1, 0): process
            for process in self._processes
            if process.exitcode not in (None, -signal.SIGTERM)
        }
        self._is_ready = False
        self._shut_down()
        for worker in range(self.num_workers):
            self._tracks.enter(worker, State.RESTARTING)
        rest_seconds = 0.0
        for worker, process in dead.items():
            failure = self._coroner.report(worker, process.pid, process.exitcode)
            episode = self._monitor.pulse.episode(worker)
            seconds = self._supervisor.failed(worker, failure, [episode] if episode >= 0 else [])
            rest_seconds = max(rest_seconds, seconds)
        if not dead:
            rest_seconds = self._supervisor.failed(0, EnvFailure("the process pool broke, nobody knows why"))
        self._rounds.book.worker_restarts += max(1, len(dead))
        time.sleep(rest_seconds)

    def renew(self, start: Start) -> None:
        self._rounds.renew(start)
        self._futures = {}  # those under way end for nobody

    def close(self) -> None:
        self._watch.close()
        self._shut_down(CLOSE_SECONDS)
        self._monitor.close()

    def _shut_down(self, grace_seconds: float = 0.0) -> None:
        if self._processes:
            self._pool.shutdown(wait=False, cancel_futures=True)
            processes.stop(self._processes, grace_seconds)
            self._processes = []


# ---------------------------------------------------------------------------------------------- in the workers

_setup: WorkerSetup | None = None
_index = -1
_worker: Worker | None = None
_start_failure: Exception | None = None


def _start(setup: WorkerSetup, all_started: Barrier, indices: Connection) -> None:
    global _setup, _index, _start_failure
    _setup = setup
    _index = int.from_bytes(os.read(indices.fileno(), INDEX_BYTES))
    setup.monitor.pulse.of(_index).enter(os.getpid())
    try:
        _build()
    except Exception as failure:
        _start_failure = failure
    all_started.wait()


def _build() -> Worker:
    global _worker
    if _worker is None:
        assert _setup is not None
        _worker = Worker(_setup, _index)
    return _worker


def _hello() -> None:
    """Answers once the worker has started; an initializer that raises would only break the pool, without a word."""
    if _start_failure is not None:
        raise _told(_start_failure)


def _run_episode(number: int) -> tuple[int, Segment]:
    """With the worker's index. After a failure the next episode begins with new environments."""
    global _worker
    try:
        return _index, _build().run_episode(number)
    except Exception as failure:
        if _worker is not None:
            worker, _worker = _worker, None
            worker.close()
        raise _told(failure) from None


def _told(failure: Exception) -> Exception:
    """As it is, or with its traceback as text; and whose it was."""
    if not isinstance(failure, (UserError, EnvFailure)):
        failure = EnvFailure(f"a worker failed:\n{''.join(traceback.format_exception(failure))}")
    failure.worker = _index  # type: ignore[union-attr]
    return failure
