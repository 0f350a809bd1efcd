"""Every case in turn, again and again, each in a process of its own, until the time is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from freerun.adapters.tensor_envs import find_builder
from freerun.core import EnvFailure, ModeTraits, UserError
from freerun.persistence import trust
from freerun.settings.registry import find_mode
from freerun.tools.bench import load_meter
from freerun.tools.bench.bench_job import BARE, FIGURES, Job, packed
from freerun.tools.bench.bench_options import BenchOptions, code_in_bench, read_mode
from freerun.tools.bench.results import SEQUENTIAL, Case, Results

MOST_BARE_SECONDS = 3.0
"""The bare limit has no updates to wait for, so it needs less time than a mode."""
MOST_STEPS_PER_UPDATE = 10_000
UPDATES_PER_RUN = 4
"""A run should see this many updates at the limit of the machine, so that no single one decides its rate."""
SEGMENT_STEPS = 24
"""The steps of every environment that is tensors in an update, if --steps-per-update is not given: the modes' own."""
LEAST_SECONDS = 5.0
"""With less left, nothing more is begun."""
CLOSE_SECONDS = 10.0
"""The time that a job has to close its workers after SIGINT, before it is killed."""
TIMELINES = "timelines"


def prepare(options: BenchOptions) -> Results:
    """All that is to be measured; modes that make no sense here are left out with a sentence."""
    # What starts slowly comes last in a round, so that the others are measured if the time runs out.
    labels = sorted(options.labels(), key=lambda label: _traits(label).starts_slowly)
    cases = [] if options.is_tensors else [Case(BARE, 1)]
    if SEQUENTIAL in labels:
        cases.append(Case(SEQUENTIAL, 1, problem=_problem(SEQUENTIAL, options)))
    for number in options.numbers():
        cases += [Case(BARE, number)] if number > 1 or options.is_tensors else []
        cases += [Case(label, number, problem=_problem(label, options)) for label in labels if label != SEQUENTIAL]
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return Results(options, load_meter.describe(), cases, date=date)


def _traits(label: str) -> ModeTraits:
    return find_mode(read_mode(label)[0]).traits


def _problem(label: str, options: BenchOptions) -> str | None:
    if options.is_tensors:
        return "it does not step environments that are tensors" if _traits(label).tensors is None else None
    if _traits(label).tensors is not None and find_builder(options.env) is not None:
        return f"it steps {options.env} as tensors, which is other work: --num-envs measures that"
    return None


class Bench:
    """Adds runs to results; `tell` hears of each."""

    def __init__(self, results: Results, folder: Path, tell: Callable[[str], None]):
        self.results = results
        self.options = results.options
        self._folder = folder
        self._tell = tell
        self._deadline = time.monotonic() + self.options.seconds_allowed()

    def run(self) -> None:
        """Measure until everything is measured or the time is up. Ctrl-C ends it, and what was measured stays."""
        began, before = time.monotonic(), self.results.seconds
        self.results.outcome = "interrupted"
        try:
            self._run_rounds(lambda: before + time.monotonic() - began)
        finally:
            self.results.seconds = before + time.monotonic() - began
            if self.results.any_runs:
                self._write()

    def _run_rounds(self, spent: Callable[[], float]) -> None:
        cut = False
        for repeat in range(self.options.repeats):
            due = [case for case in self.results.cases if case.problem is None and len(case.runs) <= repeat]
            known = {case.name: case.runs[-1]["wall_seconds"] for case in due if case.runs}
            left_out = unaffordable(known, self._seconds_left())
            # Every other round goes backwards, so that a machine which slows down with time favours no mode.
            for case in due if repeat % 2 == 0 else reversed(due):
                if case.name in left_out or self._seconds_left() < LEAST_SECONDS:
                    cut = True
                    continue
                self._measure(case, repeat)
                self.results.seconds = spent()
                self._write()
        self.results.outcome = "out of time" if cut or self._seconds_left() < 0 else "finished"

    def _write(self) -> None:
        self.results.write(self._folder)
        # Whoever resumes this bench on this machine need not trust its code again.
        trust.sign(self._folder, code_in_bench(asdict(self.options)))

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def _measure(self, case: Case, repeat: int) -> None:
        limit = self.results.case(BARE, case.num_workers)
        if not case.is_bare and (limit is None or not limit.runs):
            case.problem = "the limit to compare it with could not be measured"
            return
        # It is decided once: all runs of a case must do the same work, also after --resume.
        if not case.is_bare and not case.steps_per_update:
            case.steps_per_update = self._steps_per_update(case)
        began = time.monotonic()
        outcome = run_job(self._job(case), self._seconds_left())
        figures = outcome.figures
        if figures is None:
            if not self.results.any_runs:  # the very first job: nothing of this environment can be measured
                if outcome.traceback is not None:
                    raise EnvFailure(f"{self.options.env} cannot be measured: {outcome.traceback}")
                raise UserError(f"{self.options.env} cannot be measured: {outcome.problem}")
            if not case.runs:  # one failure does not make earlier figures wrong
                case.problem = outcome.problem
            self._tell(f"{case.name}: {outcome.traceback or outcome.problem}")
            return
        _make_folder(self._folder / TIMELINES)  # once there is something to keep
        case.runs.append({**figures, "wall_seconds": time.monotonic() - began})
        self._tell(
            f"[{repeat + 1}/{self.options.repeats}] {case.name}: {figures['steps_per_second']:,.0f} steps/s "
            f"({self._seconds_left():.0f} s left)"
        )

    def _job(self, case: Case) -> Job:
        options = self.options
        if case.is_bare:
            seconds = min(options.seconds, MOST_BARE_SECONDS)
            bare = Job(options.env, BARE, case.num_workers, seconds, env_args=options.env_args, device=options.device)
            bare = replace(bare, is_tensors=options.is_tensors)
            return replace(bare, max_episode_steps=options.max_episode_steps)
        return replace(self.results.job(case), picture=str(self._folder / TIMELINES / case.picture))

    def _steps_per_update(self, case: Case) -> int:
        if self.options.steps_per_update is not None:
            return self.options.steps_per_update
        if self.options.is_tensors:
            return case.num_workers * SEGMENT_STEPS
        traits = _traits(case.label)
        # A mode that always has one worker steps its environments one after another.
        has_one_worker = traits.workers_flag is None
        limit = self.results.case(BARE, 1 if has_one_worker else case.num_workers)
        assert limit is not None
        steps_at_once = 1 if has_one_worker and not traits.whole_episodes else self.results.episode_steps
        least = case.num_workers * steps_at_once
        return steps_per_update(limit.runs[0]["steps_per_second"], least, self.options.seconds)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}; name another --output") from None


def steps_per_update(limit: float, least: float, seconds: float) -> int:
    """Enough for several updates in a run at the limit of the machine, and something from every worker."""
    return max(1, round(max(least, min(MOST_STEPS_PER_UPDATE, limit * seconds / UPDATES_PER_RUN))))


def unaffordable(costs: Mapping[str, float], seconds: float) -> set[str]:
    """What to leave out of a round so that the rest can be done in time: what takes longest."""
    kept = sorted(costs, key=lambda name: costs[name])
    while kept and sum(costs[name] for name in kept) > seconds:
        kept.pop()
    return set(costs) - set(kept)


class JobProcess(Protocol):
    """The part of `subprocess.Popen` that a job needs."""

    stdin: IO[str] | None
    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


class Outcome(NamedTuple):
    figures: dict[str, float] | None
    problem: str = ""
    """Why there are none."""
    traceback: str | None = None
    """Where something failed that the user did not ask for."""


def start_python(words: Sequence[str], output: IO[str], errors: IO[str]) -> JobProcess:
    """Start `python *words` with a pipe for its input. The tests put a faster start in the place of this function."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
    )


def run_job(job: Job, most_seconds: float) -> Outcome:
    """Run a job in a process of its own. No process of it is left when this returns."""
    # Files, because a process that is left behind would keep the end of a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start_python(["-m", "freerun.tools.bench.bench_job"], output, errors)
        try:
            assert process.stdin is not None
            process.stdin.write(packed(job))
            process.stdin.close()
            code = process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(None, "the time was up before it was measured; --max-minutes gives it more")
        finally:
            _end(process)
        output.seek(0)
        errors.seek(0)
        if code == 0:
            told = next(line for line in output.read().splitlines() if line.startswith(FIGURES))
            return Outcome(json.loads(told.removeprefix(FIGURES)))
        # Exit code 2 is a UserError, whose sentence says everything; otherwise the traceback is worth showing.
        words = errors.read().strip() or f"exit code {code}"
        last = words.splitlines()[-1]
        return Outcome(None, last) if code == 2 else Outcome(None, f"it failed: {last}", words)


def _end(process: JobProcess) -> None:
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
    finally:  # also when Ctrl-C comes again
        with contextlib.suppress(ProcessLookupError):
            # The job leads a session of its own, so this reaches workers that it has left behind.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
