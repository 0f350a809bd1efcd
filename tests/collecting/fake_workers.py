"""Workers without processes, threads or clocks: a test says what each of them reports."""

from __future__ import annotations

import numpy as np

from freerun.collecting.workers.hang_detector import SignOfLife
from freerun.collecting.workers.worker_handle import (
    Report,
    UnitFailed,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import FloatArray, Segment, WorkerHung


def make_segment(episode: int, num_steps: int = 2, seconds: float = 1.0) -> Segment:
    """A whole episode of one environment."""
    shape = (num_steps, 1)
    zeros = np.zeros(shape, np.float32)
    ended = np.zeros(shape, np.bool_)
    ended[-1] = True
    return Segment(
        obs=zeros,
        action=zeros,
        log_prob=zeros,
        reward=np.ones(shape, np.float32),
        terminated=ended,
        truncated=np.zeros_like(ended),
        next_obs=zeros,
        version=np.zeros(shape, np.int64),
        episode=np.full(shape, episode),
        seconds=seconds,
    )


class FakeHandle(WorkerHandle):
    def __init__(self, index: int, place: FakePlace):
        super().__init__(index)
        self.granted: list[int] = []
        """Every unit that it ever got, in order."""
        self.num_flushes = 0
        self.begun: int | None = None
        self.is_retired = False
        self._place = place

    def grant(self, unit: int) -> None:
        self.granted.append(unit)

    def flush(self) -> None:
        assert self in self._place.handles, "nothing can be sent to a worker that is gone"
        self.num_flushes += 1

    def retire(self) -> None:
        self.is_retired = True
        self._place.handles.remove(self)

    def suspect_episode(self) -> int | None:
        return self.units[0] if self.units else None

    def last_begun_episode(self) -> int | None:
        return self.begun

    def sign_of_life(self) -> SignOfLife:
        return SignOfLife(self, self.activity(), 0)

    def episode(self) -> int | None:
        return self.suspect_episode()

    def stack(self) -> str:
        return "somewhere"

    def end_hung(self, failure: WorkerHung) -> None:
        self._place.lose(self, failure)


class FakePlace(WorkerPlace):
    """Reports are what the test has queued; time passes as the test says."""

    def __init__(self, starts_together: bool = False) -> None:
        self.starts_together = starts_together
        self.handles: list[FakeHandle] = []
        self.started: list[int] = []
        """The index of every worker that was ever started, in order."""
        self.reports: list[Report] = []
        self.waits: list[float | None] = []
        self.is_closed = False

    def start(self, index: int) -> FakeHandle:
        handle = FakeHandle(index, self)
        self.handles.append(handle)
        self.started.append(index)
        return handle

    def worker(self, index: int) -> FakeHandle:
        (handle,) = [handle for handle in self.handles if handle.index == index]
        return handle

    def ready(self, *indices: int) -> None:
        self.reports += [WorkerReady(self.worker(index)) for index in indices]

    def finish(self, index: int, seconds: float = 1.0) -> None:
        """The worker finishes the oldest unit that it holds."""
        worker = self.worker(index)
        self.reports.append(UnitFinished(worker, worker.units[0], make_segment(worker.units[0], seconds=seconds)))

    def fail_unit(self, index: int, failure: Exception) -> None:
        worker = self.worker(index)
        self.reports.append(UnitFailed(worker, worker.units[0], failure, index))

    def lose(self, worker: FakeHandle, failure: Exception | None) -> None:
        self.handles.remove(worker)
        self.reports.append(WorkerLost(worker, failure))

    def wait(self, seconds: float | None) -> list[Report]:
        self.waits.append(seconds)
        reports, self.reports = self.reports, []
        return reports

    def wake(self) -> None:
        """Nobody sleeps here."""

    def publish(self, weights: FloatArray, version: int) -> None:
        """Nobody acts here."""

    def close(self) -> None:
        self.is_closed = True
