"""Several trainings at once: each in a process of its own, which keeps its workers warm from job to job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import cloudpickle

from freerun.core import EnvFailure, LearnerFailure, UserError
from freerun.settings.config import AnyConfig
from freerun.tools.workflow_search.order_trainer import OrderTrainer, TrainingJob
from freerun.transport import processes

LEAVE_SECONDS = 10.0
"""The time that interrupted trainings get to save what they have learned."""


class TrainerProcesses:
    """Processes that train. They end when this one ends, and so do their workers."""

    def __init__(self, config: AnyConfig, num_episodes: int, num_at_once: int):
        self.num_at_once = num_at_once
        # They share the workers of the search, and each has one at least.
        num_workers = max(1, (config.num_workers or 1) // num_at_once)
        payload = cloudpickle.dumps((dataclasses.replace(config, num_workers=num_workers), num_episodes))
        self._processes: list[SpawnProcess] = []
        self._free: list[Connection] = []
        self._jobs: dict[Connection, TrainingJob] = {}
        for _ in range(num_at_once):
            process, connection = processes.start_server(_serve, payload)
            self._processes.append(process)
            self._free.append(connection)

    def start(self, job: TrainingJob) -> None:
        connection = self._free.pop()
        with contextlib.suppress(ConnectionError):  # `wait` says that the process has died
            connection.send(job)
        self._jobs[connection] = job

    def wait(self) -> tuple[TrainingJob, dict[str, Any] | None]:
        connection: Any = wait(list(self._jobs))[0]
        try:
            answer = connection.recv()
        except (EOFError, ConnectionError):
            raise LearnerFailure("a process of the search died: the same command continues the search") from None
        if isinstance(answer, Exception):
            raise answer
        self._free.append(connection)
        return self._jobs.pop(connection), answer

    def close(self) -> None:
        # The end of the pipe ends a process that waits for a job; SIGTERM interrupts one that trains.
        for connection in self._free:
            connection.close()
        if self._jobs:
            for process in self._processes:
                process.terminate()
        processes.stop(self._processes, LEAVE_SECONDS)


@contextlib.contextmanager
def trainer_processes(config: AnyConfig, num_episodes: int, num_at_once: int) -> Iterator[TrainerProcesses]:
    trainers = TrainerProcesses(config, num_episodes, num_at_once)
    try:
        yield trainers
    finally:
        trainers.close()


def _serve(connection: Connection, payload: bytes) -> None:
    """Train what arrives through the pipe until it is closed."""
    processes.end_with_parent()
    os.setsid()  # Ctrl-C is the search's business: it ends the trainings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trainer = OrderTrainer(*pickle.loads(payload))
    # Nobody is left to hear of a result if the search was interrupted, or has died itself.
    with contextlib.closing(trainer), contextlib.suppress(KeyboardInterrupt, BrokenPipeError, EOFError):
        while True:
            connection.send(_answer(trainer, connection.recv()))


def _answer(trainer: OrderTrainer, job: TrainingJob) -> dict[str, Any] | Exception | None:
    try:
        return trainer.train(job)
    except (UserError, EnvFailure, LearnerFailure) as failure:
        return failure
    except Exception:
        return LearnerFailure(f"a training of the search failed:\n{traceback.format_exc()}")
