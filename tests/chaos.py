"""Kills and stops workers of real runs, from outside, and looks whether anything was lost (`make chaos`).

Each mode gets a run of its own, on an environment whose observations carry their episode, their step and a checksum,
with a learner that looks at every one. A storm is a kill or a stop of one worker, of several or of all, or a row of
kills of workers that are in the middle of `env.step`; the next one comes when the run has recovered from the last.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from leftovers import OutsideRun
from sealed_env import ask_for_victim

MODES = ("sync", "pipes", "executor", "freerun", "continuous", "batch", "ray")
STORMS = {"kill one": 4, "stop one": 3, "kill all": 2, "stop all": 1, "burst": 3, "kill in steps": 3}
"""How often each comes, beside the others."""
NUM_WORKERS = 4
STEP_SECONDS = 0.01
STEP_TIMEOUT = 2.0
RECOVERY_SECONDS = 5.0
RECOVERED_SHARE = 0.95
WINDOW_SECONDS = 2.0
BASELINE_SECONDS = 10.0
SECONDS_PER_FAULT = 2.5
"""The run has steps for this long, besides those of the baseline."""
GONE_SECONDS = 5.0
VICTIM_SECONDS = 10.0
"""As long as it may take until a worker is in a step again."""


@dataclass
class Storm:
    name: str
    signals: list[str]
    limit_seconds: float
    recovery_seconds: float | None = None


@dataclass
class Report:
    mode: str
    num_faults: int = 0
    baseline: float = 0.0
    storms: list[Storm] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


class Gauge:
    """Steps per second, as metrics.jsonl tells it."""

    def __init__(self, run: OutsideRun):
        self._path = run.run_dir / "metrics.jsonl"
        self._position = 0
        self._points: deque[tuple[float, int]] = deque(maxlen=100_000)  # when it was read, steps so far

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open(encoding="utf-8") as file:
            file.seek(self._position)
            while (line := file.readline()).endswith("\n"):
                self._position += len(line.encode())
                self._points.append((time.monotonic(), json.loads(line)["step"]))

    def rate(self, start: float, stop: float) -> float:
        """Mean over that time."""
        return (self._steps_at(stop) - self._steps_at(start)) / (stop - start)

    def _steps_at(self, moment: float) -> float:
        """Between two readings, steps are made evenly."""
        before = (0.0, 0)
        for point in self._points:
            if point[0] > moment:
                share = (moment - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return float(before[1])


def options(mode: str, num_steps: int, victims: Path) -> list[str]:
    common = ["sealed_env:Sealed", "--env-args", "step_seconds", str(STEP_SECONDS), "victims", str(victims)]
    common += [
        "--algo",
        "audited-ppo",
        "--mode",
        mode,
        "--step-timeout",
        str(STEP_TIMEOUT),
        "--max-failures",
        "100000",
        "-q",
    ]
    common += ["--num-epochs", "1", "--minibatch-size", "1000", "--total-steps", str(num_steps)]
    if mode == "continuous":
        return [
            *common,
            *("--num-collectors", str(NUM_WORKERS), "--num-envs", str(NUM_WORKERS), "--collector-kind", "process"),
            *("--collection-batch-size", "10", "--steps-per-update", "40"),
        ]
    if mode == "batch":
        return [*common, "--num-envs", str(NUM_WORKERS), "--num-steps-per-env", "10"]
    lag = [] if mode == "sync" else ["--max-lag", "4"]
    return [*common, "--num-workers", str(NUM_WORKERS), "--episodes-per-update", "2", *lag]


def workers(run: OutsideRun, mode: str) -> list[psutil.Process]:
    found = []
    for process in run.family():
        try:
            is_worker = process.ppid() not in (run.process.pid, 1)
            if mode == "ray":
                is_worker = "FreerunActor." in " ".join(process.cmdline())  # within a call: not one that stands by
            if is_worker and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def send(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def plan(
    rng: random.Random, num_faults: int, names: Sequence[str]
) -> tuple[str, list[tuple[float, str, signal.Signals]]]:
    """A storm's name, and its blows: seconds to wait before, at whom (one, all or one in a step), with what."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    storms: dict[str, Callable[[], list[tuple[float, str, signal.Signals]]]] = {
        "kill one": lambda: [(0.0, "one", kill)],
        "stop one": lambda: [(0.0, "one", stop)],
        "kill all": lambda: [(0.0, "all", kill)],
        "stop all": lambda: [(0.0, "all", stop)],
        "burst": lambda: [(rng.uniform(0, 0.3), "one", rng.choice([kill, stop])) for _ in range(min(10, num_faults))],
        # Without a pause: the next one is killed in its first step after the last was.
        "kill in steps": lambda: [(0.0, "in a step", kill) for _ in range(min(10, num_faults))],
    }
    name = rng.choices(names, weights=[STORMS[name] for name in names])[0]
    return name, storms[name]()


def targets(run: OutsideRun, mode: str, whom: str, victims: Path, rng: random.Random) -> list[psutil.Process]:
    if whom == "in a step":
        pid = ask_for_victim(victims, VICTIM_SECONDS)
        return [psutil.Process(pid)] if pid is not None and psutil.pid_exists(pid) else []
    there = workers(run, mode)
    return there if whom == "all" else rng.sample(there, min(1, len(there)))


def torment(
    mode: str,
    num_faults: int,
    seed: int,
    run_dir: Path,
    say: Callable[[str], None],
    storms: Sequence[str] = tuple(STORMS),
) -> Report:
    """One run, to its end."""
    rng = random.Random(seed)
    report = Report(mode)
    victims = run_dir.with_name(f"{run_dir.name}-victims")
    victims.mkdir()
    # About as long as the storms take; it goes on for as long as its steps take. `batch` makes them one after another.
    num_at_once = 1 if mode == "batch" else NUM_WORKERS
    num_steps = int(num_at_once / STEP_SECONDS * (BASELINE_SECONDS + SECONDS_PER_FAULT * num_faults))
    command = ("-m", "audited_ppo", "train")
    with OutsideRun(options(mode, num_steps, victims), run_dir, command) as run:
        run.wait_for_updates(5)
        gauge = Gauge(run)
        started = time.monotonic()
        while time.monotonic() < started + BASELINE_SECONDS:
            gauge.read()
            time.sleep(0.05)
        report.baseline = gauge.rate(started + 1.0, time.monotonic())
        say(f"{mode}: {report.baseline:.0f} steps/s undisturbed")
        while report.num_faults < num_faults and run.process.poll() is None:
            name, blows = plan(rng, num_faults - report.num_faults, storms)
            storm = Storm(name, [], RECOVERY_SECONDS)
            for wait, whom, number in blows:
                time.sleep(wait)
                for process in targets(run, mode, whom, victims, rng):
                    if send(process, number):
                        storm.signals.append(number.name)
            if not storm.signals:
                time.sleep(0.2)
                continue
            report.num_faults += len(storm.signals)
            if "SIGSTOP" in storm.signals:
                storm.limit_seconds += STEP_TIMEOUT
            report.storms.append(storm)
            recover(run, gauge, storm, report)
            say(f"{mode}: {report.num_faults} faults; {name} ({len(storm.signals)}): {_told(storm)}")
        try:
            exit_code = run.process.wait(num_steps * STEP_SECONDS * 3 + 120)
        except Exception as error:
            report.complaints.append(f"the run does not end: {error}")
            return report
        if exit_code:
            report.complaints.append(f"the run ended with {exit_code}: {run.text[-3000:]}")
        report.complaints += [f"left behind: {left}" for left in run.left_after(GONE_SECONDS)]
        check(report, run_dir)
    return report


def recover(run: OutsideRun, gauge: Gauge, storm: Storm, report: Report) -> None:
    """Until the rate over a window is what it was, or that is hopeless; and a little longer at random."""
    struck = time.monotonic()
    start = struck
    while run.process.poll() is None and time.monotonic() < struck + storm.limit_seconds + 3 * WINDOW_SECONDS:
        time.sleep(0.05)
        gauge.read()
        while start + WINDOW_SECONDS <= time.monotonic() - 0.2:
            if gauge.rate(start, start + WINDOW_SECONDS) >= RECOVERED_SHARE * report.baseline:
                storm.recovery_seconds = start - struck
                break
            start += 0.1
        if storm.recovery_seconds is not None:
            break
    if run.process.poll() is None and (storm.recovery_seconds is None or storm.recovery_seconds > storm.limit_seconds):
        report.complaints.append(f"{storm.name} ({', '.join(storm.signals)}): {_told(storm)}")


def _told(storm: Storm) -> str:
    if storm.recovery_seconds is None:
        return f"not back to {RECOVERED_SHARE:.0%} (limit {storm.limit_seconds:.0f} s)"
    return f"back to {RECOVERED_SHARE:.0%} after {storm.recovery_seconds:.1f} s (limit {storm.limit_seconds:.0f})"


def check(report: Report, run_dir: Path) -> None:
    """The books: everything that was started is accounted for, and every step was looked at once."""
    summary = report.summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    names = ("trained", "handed_over_untrained", "cut", "broken", "dropped", "in_flight")
    if ledger["started"] != sum(ledger[name] for name in names):
        report.complaints.append(f"the ledger does not balance: {ledger}")
    if summary["outcome"] != "finished":
        report.complaints.append(f"the run was {summary['outcome']}")
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    if last["audited_steps"] != summary["env_steps"]:
        report.complaints.append(f"{summary['env_steps']} steps were trained, {last['audited_steps']} audited")
    num_told = sum(summary["incidents"].values())
    if not num_told:
        report.complaints.append("no incident was told of")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--faults", type=int, default=200, help="signals sent to workers, in each mode")
    parser.add_argument("--storms", nargs="+", default=tuple(STORMS), choices=tuple(STORMS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    reports = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for mode in arguments.modes:
            run_dir = Path(folder) / mode
            say = functools.partial(print, flush=True)
            reports.append(torment(mode, arguments.faults, arguments.seed, run_dir, say, arguments.storms))
    print(table(reports))
    for report in reports:
        for complaint in report.complaints:
            print(f"{report.mode}: {complaint}", file=sys.stderr)
    return 1 if any(report.complaints for report in reports) else 0


def table(reports: list[Report]) -> str:
    lines = [
        "| mode | faults | storms | steps/s before | worst recovery after kills | after stops | steps audited "
        "| run again | cut | complaints |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        kills = [storm.recovery_seconds for storm in report.storms if "SIGSTOP" not in storm.signals]
        stops = [storm.recovery_seconds for storm in report.storms if "SIGSTOP" in storm.signals]
        ledger = report.summary.get("ledger", {})
        lines.append(
            f"| {report.mode} | {report.num_faults} | {len(report.storms)} | {report.baseline:.0f} | {_worst(kills)} | "
            f"{_worst(stops)} | {report.summary.get('env_steps', 0):,} | {ledger.get('rerun', '-')} | "
            f"{ledger.get('cut', '-')} | {len(report.complaints)} |"
        )
    return "\n".join(lines) + "\n"


def _worst(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{max(known):.1f} s" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
