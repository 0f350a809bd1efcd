"""Worker processes behind a pipe each. `PipeProcesses` send whole episodes through it."""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import abstractmethod
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Generic, TypeVar

from freerun.collecting.workers.hang_detector import Activity, SignOfLife
from freerun.collecting.workers.worker import Worker, WorkerSetup, reporting
from freerun.collecting.workers.worker_handle import (
    Report,
    UnitFinished,
    WorkerHandle,
    WorkerLost,
    WorkerPlace,
    WorkerReady,
)
from freerun.core import FloatArray, Segment, WorkerHung
from freerun.transport import processes
from freerun.transport.exit_diagnosis import ExitDiagnosis, is_stopped
from freerun.transport.message_hub import MessageHub

CLOSE_SECONDS = 1.0
MAX_READ_SECONDS = 0.5
"""A message that takes longer than this to read comes from a worker that stopped in the middle of it."""


class ProcessHandle(WorkerHandle):
    """A worker in a process of its own, which ends when its end of the pipe is closed."""

    def __init__(self, index: int, process: ForkServerProcess, connection: Connection, place: ProcessPlace[Any]):
        super().__init__(index)
        self.process = process
        self.connection = connection
        self.reported_failure: Exception | None = None
        """The failure that it has reported before it ended, if it still could."""
        self._place = place

    def retire(self) -> None:
        self._place.let_go(self)

    def suspect_episode(self) -> int | None:
        # The heartbeat still shows the last episode after it has been handed over.
        episode = self.episode()
        return episode if episode in self.units else None

    def activity(self) -> Activity:
        """A worker that only waits until another one's message is read to its end is not to blame for its silence."""
        return Activity.WAITING if self._place.is_held_up_by_another(self) else super().activity()

    def sign_of_life(self) -> SignOfLife:
        beats = self._place.heartbeats.num_beats(self.index)
        return SignOfLife(self.process.pid, self.activity(), beats)

    def episode(self) -> int | None:
        episode = self._place.heartbeats.episode(self.index)
        return episode if episode >= 0 else None

    def is_stopped(self) -> bool:
        return self.process.pid is not None and is_stopped(self.process.pid)

    def stack(self) -> str:
        return self._place.stacks.capture(self.process.pid or 0)

    def end_hung(self, failure: WorkerHung) -> None:
        """Kill the process. Its pipe then breaks, and the diagnosis names this failure as the cause."""
        if self.process.pid is not None:
            # The reason first, because the end-of-file follows the kill at once.
            self._place.diagnosis.record_kill(self.process.pid, failure)
            processes.kill(self.process.pid)


Handle = TypeVar("Handle", bound=ProcessHandle)


class ProcessPlace(WorkerPlace, Generic[Handle]):
    """Worker processes, started by the fork server; one hub waits for their messages."""

    def __init__(self, setup: WorkerSetup):
        self._setup = setup
        self.heartbeats, self.stacks = setup.monitor.heartbeats, setup.monitor.stacks
        self.diagnosis = ExitDiagnosis()
        self.ending_lock = self.diagnosis.kill_lock
        self._hub: MessageHub[Handle] = MessageHub()
        self._handles: list[Handle] = []
        self._leaving: list[ForkServerProcess] = []  # retired, and not ended yet
        self._reading: tuple[WorkerHandle, float] | None = None  # whose message is being read, and since when

    @abstractmethod
    def launch(self, index: int, connection: Connection) -> ForkServerProcess:
        """Start a process with its end of the pipe."""

    @abstractmethod
    def make_handle(self, index: int, process: ForkServerProcess, connection: Connection) -> Handle: ...

    def start(self, index: int) -> Handle:
        self.heartbeats.clear(index)
        ours, theirs = processes.context().Pipe()
        process = self.launch(index, theirs)
        # Only the worker may hold its end of the pipe: its death must be the end-of-file of ours.
        theirs.close()
        handle = self.make_handle(index, process, ours)
        self._handles.append(handle)
        self._hub.add(ours, handle)
        return handle

    def messages(self, seconds: float | None) -> Iterator[tuple[Handle, bytes | None]]:
        """Wait for messages, and yield each with its worker; None if the worker's pipe has ended.

        What a message means is for `wait` to say, which stands beside whatever sends it."""
        for handle in self._hub.ready(seconds):
            yield handle, self._receive(handle)

    def _receive(self, handle: Handle) -> bytes | None:
        self._reading = (handle, time.monotonic())
        try:
            return handle.connection.recv_bytes()
        except (EOFError, OSError):  # an OSError without a number: the worker died in the middle of a message
            return None
        finally:
            self._reading = None

    def is_held_up_by_another(self, handle: WorkerHandle) -> bool:
        reading = self._reading  # one read of a tuple, because the fleet's thread replaces it meanwhile
        if reading is None:
            return False
        other, since = reading
        return other is not handle and time.monotonic() - since > MAX_READ_SECONDS

    def lost(self, handle: Handle) -> WorkerLost:
        """Make sure that a process whose pipe has ended is gone, and report why."""
        self._remove(handle)
        handle.connection.close()
        processes.stop([handle.process], CLOSE_SECONDS)
        exit_code = handle.process.exitcode
        cause = handle.reported_failure or self.diagnosis.diagnose(handle.index, handle.process.pid, exit_code)
        return WorkerLost(handle, cause)

    def _remove(self, handle: Handle) -> None:
        self._hub.remove(handle.connection)
        self._handles.remove(handle)

    def let_go(self, handle: ProcessHandle) -> None:
        """Close a worker's pipe, so that its process ends by itself."""
        self._remove(handle)  # type: ignore[arg-type]
        handle.connection.close()
        self._leaving = [process for process in self._leaving if process.exitcode is None]
        self._leaving.append(handle.process)

    def wake(self) -> None:
        self._hub.wake()

    def publish(self, weights: FloatArray, version: int) -> None:
        self._setup.board.publish(weights, version)

    def num_step_calls(self) -> int:
        return self.heartbeats.total_beats

    def before_look(self) -> None:
        """Note when the kernel has killed something, so that the cause of a death can be named later."""
        self.diagnosis.refresh()

    def abort(self) -> None:
        processes.stop([handle.process for handle in self._handles], grace_seconds=0.0)

    def close(self) -> None:
        for handle in self._handles:
            handle.connection.close()
        processes.stop([*(handle.process for handle in self._handles), *self._leaving], CLOSE_SECONDS)
        self._hub.close()
        self._setup.monitor.close()


# ---------------------------------------------------------------------------------------------- whole episodes, pickled


class PipeHandle(ProcessHandle):
    """A worker that plays one episode after another and sends each as one message."""

    def grant(self, unit: int) -> None:
        # The end-of-file of a worker that has died is on its way to `wait`.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(unit)


class PipeProcesses(ProcessPlace[PipeHandle]):
    """Processes that get episode numbers and send whole episodes, both through their pipe."""

    def launch(self, index: int, connection: Connection) -> ForkServerProcess:
        return processes.start(_play_episodes, connection, self._setup, index)

    def make_handle(self, index: int, process: ForkServerProcess, connection: Connection) -> PipeHandle:
        return PipeHandle(index, process, connection, self)

    def wait(self, seconds: float | None) -> Iterator[Report]:
        for handle, message in self.messages(seconds):
            content = None if message is None else pickle.loads(message)
            if content is None:
                yield self.lost(handle)
            elif isinstance(content, Segment):
                # It plays episodes in the order in which they were granted.
                yield UnitFinished(handle, handle.units[0], content)
            elif isinstance(content, Exception):
                handle.reported_failure = content  # it closes its environments now, and then its end of the pipe
            else:
                yield WorkerReady(handle)


def _play_episodes(connection: Connection, setup: WorkerSetup, index: int) -> None:
    """Run in the worker: an episode's number comes in, the episode goes out, until the pipe closes."""
    with reporting(connection.send):
        worker = Worker(setup, index)
        connection.send("ready")
        while True:
            connection.send(worker.run_episode(connection.recv()))
