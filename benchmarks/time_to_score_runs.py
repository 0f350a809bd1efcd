"""The runs of time_to_score.py: planned, started, watched from outside, judged and kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from run_file import RunFile, versions
from time_to_score_report import Point, Record
from time_to_score_systems import REFERENCE, SYSTEMS, TASKS, Run

from freerun.tools.bench.load_meter import processor

MIN_EPISODES = 20
STARTUP_LIMIT_SECONDS = 120.0
STOP_GRACE_SECONDS = 20.0
MAX_CURVE_POINTS = 200
SYSTEMS_SCRIPT = str(Path(__file__).with_name("time_to_score_systems.py"))


@dataclass(frozen=True)
class Plan:
    """A run to be made."""

    task: str
    system: str
    seed: int
    max_seconds: float
    num_cores: int

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything that decides the outcome; as JSON gives it back, to be compared with what was run."""
        task = TASKS[self.task]
        conditions = {
            "score": task.score,
            "max_steps": task.max_steps,
            "max_seconds": self.max_seconds,
            "num_cores": self.num_cores,
            "settings": SYSTEMS[self.system].settings(self.task),
        }
        given_back: dict[str, Any] = json.loads(json.dumps(conditions))
        return given_back

    def is_plan_of(self, record: Record) -> bool:
        return (record.task, record.system, record.seed) == (self.task, self.system, self.seed)

    def is_fulfilled_by(self, record: Record) -> bool:
        wanted, found = self.conditions, dict(record.conditions)
        # Older runs do not say that they scaled their advantages, because there was no other default.
        if "normalize_advantage" in wanted["settings"]:
            found["settings"] = {"normalize_advantage": True, **found["settings"]}
        return self.is_plan_of(record) and found == wanted

    def __str__(self) -> str:
        return f"{self.task}, {SYSTEMS[self.system].label}, seed {self.seed}"


class Results(RunFile[Record]):
    """time_to_score.json."""

    def __init__(self, path: Path):
        super().__init__(path, Record)

    def forget(self, plan: Plan) -> None:
        self.records = [record for record in self.records if not plan.is_plan_of(record)]
        self.failures = [failure for failure in self.failures if failure["run"] != str(plan)]

    def expected_seconds(self, plan: Plan) -> float:
        """As long as the longest earlier run of its kind; 0 if there was none."""
        kind = (plan.task, plan.system, plan.conditions)
        return max((r.process_seconds for r in self.records if (r.task, r.system, r.conditions) == kind), default=0.0)


# ---------------------------------------------------------------------------------------------- a process


def versions_of(system: str) -> dict[str, str]:
    """Of what the system runs on; not of freerun's source, which may change between the others' runs."""
    return {name: version for name, version in versions().items() if name != "freerun" or system == REFERENCE}


class Job:
    """A run in a process of its own, watched from outside: all systems are judged by the same lines of code."""

    def __init__(self, plan: Plan, cores: tuple[int, ...], num_parallel: int):
        self.plan, self.cores = plan, cores
        self._num_parallel = num_parallel
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name) / "run"
        self._log = Path(self._temporary.name) / "log"
        self._versions = versions_of(plan.system)
        self._unread = 0
        self._points: list[Point] = []
        self._stopped_at: float | None = None
        self.reached = False
        run = Run(plan.task, plan.seed, TASKS[plan.task].max_steps, plan.conditions["settings"], self._folder)
        arguments = [plan.system, json.dumps({**asdict(run), "folder": str(run.folder)}), json.dumps(cores)]
        # A second thread gains nothing on networks this small: 11.3 s with one, 13.0 s with two, for 49,152 steps of
        # single-file PPO on LunarLander (one run of each). The other cores are for workers.
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._started, self._started_clock = time.perf_counter(), time.time()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, SYSTEMS_SCRIPT, *arguments],
                env={**os.environ, **one_thread, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def follow(self) -> bool:
        """Read what is new, end the run once it is decided; false when it has ended."""
        ended = self._process.poll() is not None
        for line in self._new_lines():
            if self._stopped_at is None:
                self._judge(line)
        if ended:
            return False
        if self._seconds > self.plan.max_seconds + STARTUP_LIMIT_SECONDS:
            self.stop()
        if self._stopped_at is not None and self._seconds > self._stopped_at + STOP_GRACE_SECONDS:
            self._kill()
        return True

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines only: the last one may still be written."""
        with contextlib.suppress(FileNotFoundError), (self._folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._unread)
            for line in file:
                if line.endswith(b"\n"):
                    self._unread += len(line)
                    yield json.loads(line)

    def _judge(self, line: dict[str, Any]) -> None:
        if line["wall_seconds"] > self.plan.max_seconds:
            self.stop()
            return
        if line["return_mean"] is None:  # no episode has ended yet
            return
        self._points.append((line["step"], line["wall_seconds"], line["return_mean"], line["episodes"]))
        if line["episodes"] >= MIN_EPISODES and line["return_mean"] >= TASKS[self.plan.task].score:
            self.reached = True
            self.stop()

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._seconds
            self._process.send_signal(signal.SIGINT)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End it without a result."""
        self._process.kill()
        self._process.wait()
        self._kill()
        self._temporary.cleanup()

    def finish(self, results: Results) -> str:
        """Enter the outcome of an ended process into the results; say it in a line."""
        self._kill()  # whatever it has left behind would disturb the next run on these cores
        results.forget(self.plan)
        if self._points and (self._stopped_at is not None or self._process.returncode == 0):
            record = self._record()
            results.records.append(record)
            outcome = f"{TASKS[self.plan.task].score:g} reached" if self.reached else "NOT reached"
            line = f"{self.plan}: {outcome} after {record.seconds:.1f} s, {record.num_steps} steps"
        else:
            log = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            results.failures.append({"run": str(self.plan), "exit": self._process.returncode, "log": log})
            line = f"{self.plan}: FAILED with exit code {self._process.returncode}\n{log}"
        results.save()
        self._temporary.cleanup()
        return line

    def _record(self) -> Record:
        step, seconds, _, episodes = self._points[-1]
        chosen = np.unique(np.linspace(0, len(self._points) - 1, MAX_CURVE_POINTS).round().astype(int))
        of_its_own = self._folder / "versions.json"
        return Record(
            task=self.plan.task,
            system=self.plan.system,
            seed=self.plan.seed,
            conditions=self.plan.conditions,
            reached=self.reached,
            seconds=round(seconds, 3),
            startup_seconds=round((self._folder / "config.json").stat().st_mtime - self._started_clock, 3),
            num_steps=step,
            num_episodes=episodes,
            curve=[(s, round(t, 2), round(value, 3), n) for s, t, value, n in (self._points[row] for row in chosen)],
            versions=json.loads(of_its_own.read_text(encoding="utf-8")) if of_its_own.exists() else self._versions,
            machine=f"{os.cpu_count()} × {processor()}",
            cores=list(self.cores),
            num_parallel=self._num_parallel,
            process_seconds=round(self._seconds, 1),
        )
