"""`executor`: a ProcessPoolExecutor whose processes keep environment and policy warm; `as_completed` hands over."""

from __future__ import annotations

import multiprocessing
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Barrier

from freerun.collectors.rounds import Rounds
from freerun.collectors.worker import Worker, WorkerSetup
from freerun.core import (
    CollectorSettings,
    Counts,
    Demand,
    EnvFactory,
    EnvFailure,
    FloatArray,
    Policy,
    Segment,
    State,
    UserError,
)
from freerun.transport import processes
from freerun.transport.weights import WeightsBoard

MAX_BREAKS_IN_A_ROW = 3
CLOSE_SECONDS = 1.0


class Executor:
    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        self._context = processes.context()
        self.num_workers = settings.num_workers
        self._rounds = Rounds(settings.max_lag)
        self._tracks = settings.tracks
        self._board = WeightsBoard(self._context, policy.weights.size)
        self._setup = WorkerSetup.pack(factory, policy, self._board, settings)
        self._breaks_in_a_row = 0
        self._futures: dict[int, Future[Segment]] = {}
        self._start_pool()

    def _start_pool(self) -> None:
        others = set(multiprocessing.active_children())
        # A pool starts a process only when none is idle: nobody is idle until all have met here.
        all_started = self._context.Barrier(self.num_workers)
        self._pool = ProcessPoolExecutor(self.num_workers, self._context, _start, (self._setup, all_started))
        with processes.without_main():
            hellos = [self._pool.submit(_hello) for _ in range(self.num_workers)]
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        try:
            for hello in hellos:
                hello.result()
        except BrokenProcessPool as broken:
            self.close()
            raise EnvFailure("the workers died while they were starting") from broken
        except BaseException:
            self.close()
            raise

    def counts(self) -> Counts:
        return self._rounds.counts()

    def publish(self, weights: FloatArray, version: int) -> None:
        self._board.publish(weights, version)
        self._rounds.version = version

    def collect(self, demand: Demand) -> list[Segment]:
        if not demand:
            self._finish_arrived()
            return self._rounds.take_arrived()
        self._rounds.open(demand)
        while (segments := self._rounds.take()) is None:
            try:
                self._submit_granted()
                for future in as_completed([self._futures[number] for number in self._rounds.missing]):
                    self._finish(future.result())
            except BrokenProcessPool:
                self._rebuild()
        return segments

    def _submit_granted(self) -> None:
        with processes.without_main():  # the pool starts a missing process when it is given work
            while (number := self._rounds.next()) is not None:
                try:
                    self._futures[number] = self._pool.submit(_run_episode, number)
                except BrokenProcessPool:
                    self._rounds.lost(number)
                    raise

    def _finish(self, segment: Segment) -> None:
        number = int(segment.episode[0, 0])
        self._rounds.finish(number, segment)
        del self._futures[number]
        self._breaks_in_a_row = 0

    def _finish_arrived(self) -> None:
        for future in [future for future in self._futures.values() if future.done()]:
            self._finish(future.result())

    def _rebuild(self) -> None:
        """One dead process breaks the whole pool: keep what had arrived, run the rest again in a new one."""
        self._breaks_in_a_row += 1
        for number, future in list(self._futures.items()):
            if future.done() and not future.cancelled() and future.exception() is None:
                self._finish(future.result())
            else:
                del self._futures[number]
                self._rounds.lost(number)
        if self._breaks_in_a_row >= MAX_BREAKS_IN_A_ROW:
            raise EnvFailure(f"the process pool broke {self._breaks_in_a_row} times without finishing an episode")
        self._rounds.book.worker_restarts += 1
        self.close()
        for worker in range(self.num_workers):
            self._tracks.enter(worker, State.RESTARTING)
        self._start_pool()

    def renew(self, series: int) -> None:
        self._rounds.renew(series)
        self._futures = {}  # those under way end for nobody

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        processes.stop(self._processes, CLOSE_SECONDS)


# ---------------------------------------------------------------------------------------------- in the workers

_worker: Worker | None = None
_start_failure: Exception | None = None


def _start(setup: WorkerSetup, all_started: Barrier) -> None:
    global _worker, _start_failure
    index = all_started.wait()  # each process gets another one
    try:
        _worker = Worker(setup, index)
    except (UserError, EnvFailure) as failure:
        _start_failure = failure
    except Exception:
        _start_failure = EnvFailure(f"a worker failed to start:\n{traceback.format_exc()}")
    all_started.wait()


def _hello() -> None:
    """Answers once the worker has started; an initializer that raises would only break the pool, without a word."""
    if _start_failure is not None:
        raise _start_failure


def _run_episode(number: int) -> Segment:
    assert _worker is not None
    return _worker.run_episode(number)
