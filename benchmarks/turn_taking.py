"""Trainings that take turns on one machine.

A machine that is shared with others changes its speed within seconds, by more than two versions or modes differ. So the
trainings to compare run at the same time: one goes on for a second while the others are paused (SIGSTOP), and only the
seconds in which a training was not paused count.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

TURN_SECONDS = 1.0
WARM_UP_UPDATES = 2
FEWEST_UPDATES = 2
"""The fewest updates that are measured, however long they take."""
START_SECONDS = 300.0


class Training:
    """`freerun train` in a process of its own, which can be paused with SIGSTOP so that several take turns."""

    def __init__(self, flags: Sequence[str], source: Path | None = None):
        """Start `freerun train` with these flags; `source` is the src folder of another checkout to run."""
        self.flags = shlex.join(flags)
        self._folder = tempfile.TemporaryDirectory()
        run_dir = Path(self._folder.name) / "run"
        quiet = ["--total-steps", str(10**9), "--checkpoint-every", "never", "-q", "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "freerun", "train", *flags, *quiet]
        environment = {**os.environ, **({} if source is None else {"PYTHONPATH": str(source)})}
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)
        self._metrics = run_dir / "metrics.jsonl"
        self._awake = 0.0
        self._marks: list[tuple[float, int]] = []  # per update: seconds in which the run was not paused, env steps

    def __enter__(self) -> Training:
        return self

    def warm_up(self) -> None:
        """Run until the first updates are over: they include the start of workers and the first compilation."""
        deadline = time.monotonic() + START_SECONDS
        while len(self._marks) <= WARM_UP_UPDATES:
            self.go_on(TURN_SECONDS)
            if time.monotonic() > deadline:
                raise SystemExit(f"freerun train {self.flags} made no update in {START_SECONDS:.0f} s")

    def turn(self, seconds: float) -> None:
        self._tell(signal.SIGCONT)
        self.go_on(seconds)
        self.rest()

    def rest(self) -> None:
        self._tell(signal.SIGSTOP)

    def go_on(self, seconds: float) -> None:
        began, before = time.perf_counter(), self._awake
        while self._awake < before + seconds:
            if self._process.poll() is not None:
                raise SystemExit(f"freerun train {self.flags} ended:\n{self._errors.read_text()}")
            time.sleep(0.01)
            self._awake = before + time.perf_counter() - began
            self._look()

    def _look(self) -> None:
        if self._metrics.exists():
            lines = self._metrics.read_bytes().split(b"\n")[:-1]
            self._marks += [(self._awake, json.loads(line)["step"]) for line in lines[len(self._marks) :]]

    def is_done(self, seconds: float) -> bool:
        first, last = self._marks[WARM_UP_UPDATES], self._marks[-1]
        return last[0] - first[0] >= seconds and len(self._marks) > WARM_UP_UPDATES + FEWEST_UPDATES

    @property
    def rate(self) -> float:
        first, last = self._marks[WARM_UP_UPDATES], self._marks[-1]
        return (last[1] - first[1]) / (last[0] - first[0])

    def _tell(self, what: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(what)

    def __exit__(self, *failure: object) -> None:
        self._process.send_signal(signal.SIGTERM)  # noticed when it goes on
        self._tell(signal.SIGCONT)
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._folder.cleanup()


def take_turns(trainings: Sequence[Training], seconds: float) -> None:
    """Let every training run for this many seconds of its own, one second at a time."""
    for training in trainings:
        training.warm_up()
        training.rest()
    unfinished = list(trainings)
    while unfinished:
        for training in unfinished:
            training.turn(TURN_SECONDS)
        unfinished = [training for training in unfinished if not training.is_done(seconds)]
