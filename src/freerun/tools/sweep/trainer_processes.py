"""Trainings of a sweep in processes of their own, so that several trials run at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from freerun.core import LearnerFailure
from freerun.tools.sweep.trial_training import FAILURES, LocalTrainer, Report, TrainingOrder, TrainingOutcome
from freerun.transport import processes

EXIT_SECONDS = 10.0
"""A process that has nothing to train ends well within this."""


class RemoteTrainer:
    """A `Trainer` in a process of its own, which has its own workers. It ends with this process at the latest."""

    def __init__(self) -> None:
        # Spawned and not forked, because this process has threads, and its fork server must not load torch.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        # Not daemonic: it starts workers, which daemonic processes may not.
        self._process = context.Process(target=_serve, args=(theirs,))
        with processes.without_main():
            self._process.start()
        theirs.close()

    def train(self, order: TrainingOrder, report: Report) -> TrainingOutcome:
        try:
            self._ours.send_bytes(cloudpickle.dumps(order))
            while True:
                kind, content = self._ours.recv()
                if kind == "report":
                    self._ours.send(report(*content))
                elif kind == "failed":
                    raise content
                else:
                    outcome: TrainingOutcome = content
                    return outcome
        except (EOFError, ConnectionError):
            self._process.join(EXIT_SECONDS)
            raise LearnerFailure(
                f"a process that trains trials has died with exit code {self._process.exitcode}: "
                "freerun sweep --resume goes on with what is left"
            ) from None

    def interrupt(self) -> None:
        """Have the current training end after its update, as Ctrl-C does."""
        if self._process.pid is not None and self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        self._ours.close()  # the process sees the end of its orders
        processes.stop([self._process], EXIT_SECONDS)


def _serve(orders: Connection) -> None:
    """Train what comes through the pipe, until it is closed."""
    # Ctrl-C in a terminal reaches the whole process group; the sweep itself passes it on, once.
    os.setpgrp()
    processes.end_with_parent()
    trainer = LocalTrainer()

    def report(rung: int, value: float) -> bool:
        orders.send(("report", (rung, value)))
        return bool(orders.recv())

    try:
        while True:
            order: Any = cloudpickle.loads(orders.recv_bytes())
            try:
                answer: tuple[str, Any] = "done", trainer.train(order, report)
            except FAILURES as failure:
                answer = "failed", failure
            orders.send(answer)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # the sweep has ended
    finally:
        trainer.close()
