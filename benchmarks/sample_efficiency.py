"""How much does MBPO learn from how few real steps: beside the paper's curves, in turn and at the same time?

Return: the mean of a few episodes with the most likely actions, as the paper's code measures it. Every run is a process
of its own; finished runs are kept in sample_efficiency.json, so an interrupted benchmark continues. A run replaces that
of the same task, mode and seed alone, and the report shows all that the file holds, whatever was run this time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tyro
from pictures import is_drawn, make_plots, save
from run_file import ResultFile, write_report

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Task:
    flags: tuple[str, ...]
    goals: tuple[tuple[int, float], ...]
    """(steps, return): what issue 4 asks for."""
    reference: tuple[tuple[int, float], ...] = ()
    """The original code's curve, where known."""


SMALL = ("--preset", "mbpo-small")
TASKS = {
    "InvertedPendulum-v5": Task(
        ("--preset", "mbpo-inverted-pendulum", *SMALL, "--total-steps", "5000", "--eval-every", "500"),
        ((5000, 1000),),
        ((3000, 1000),),
    ),
    "Pendulum-v1": Task(
        (*SMALL, "Pendulum-v1", "--termination", "never", "--total-steps", "5000", "--eval-every", "500"),
        ((5000, -200),),
    ),
    "Hopper-v5": Task(
        ("--preset", "mbpo-hopper", "--total-steps", "100000", "--eval-every", "2500", "--device", "auto"),
        ((50_000, 1700), (100_000, 3000)),
        ((50_000, 1715), (60_000, 2652), (70_000, 3093), (100_000, 3325)),
    ),
    "Walker2d-v5": Task(
        ("--preset", "mbpo-walker2d", "--total-steps", "100000", "--eval-every", "2500", "--device", "auto"),
        ((100_000, 3500),),
        ((75_000, 1965), (100_000, 3502)),
    ),
}
# One environment and 50 steps at a time, whoever collects them.
SYSTEMS = {
    "sequential": ("--mode", "sequential"),
    "freerun": ("--mode", "freerun", "--num-workers", "1", "--segment-steps", "50"),
    "batch": ("--mode", "batch", "--num-envs", "1", "--num-steps-per-env", "50"),
    "continuous": (
        *("--mode", "continuous", "--num-collectors", "1", "--num-envs", "1"),
        *("--collection-batch-size", "50", "--max-queue-size", "1"),
    ),
}


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = ("InvertedPendulum-v5", "Pendulum-v1")
    """Environments to learn."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Modes to learn them in."""
    seeds: int = 5
    """Runs of each: seeds 0, 1, …"""
    jobs: int = max(1, (os.cpu_count() or 1) // 2)
    """Runs at a time."""
    flags: tuple[str, ...] = ()
    """More flags for every run."""
    max_minutes: float | None = None
    """End by then; what is missing is run by the next call."""
    output: Path = Path(__file__).parent / "results" / "sample_efficiency"
    """Folder for sample_efficiency.json, .md and .png."""
    again: bool = False
    """Also run what the file holds already; each result stays until its new run has finished."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass
class Job:
    task: str
    system: str
    seed: int
    folder: Path
    at_once: int
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, more: tuple[str, ...]) -> None:
        flags = (*TASKS[self.task].flags, *SYSTEMS[self.system], "--seed", str(self.seed), *more)
        command = [sys.executable, "-m", "freerun", "train", *flags, "--run-dir", str(self.folder / "run")]
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def record(self) -> dict[str, Any]:
        """The run's curve; of one that was ended early, as far as it came."""
        lines = (self.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = [json.loads(line) for line in lines]
        curve = {int(row["eval_step"]): row["eval_return"] for row in metrics if "eval_step" in row}
        last = metrics[-1]
        kept = (
            "step",
            "wall_seconds",
            "agent_updates",
            "dynamics_updates",
            "model_version",
            "dropped_steps",
            "lag_mean",
        )
        return {
            "task": self.task,
            "system": self.system,
            "seed": self.seed,
            "at_once": self.at_once,
            "curve": sorted(curve.items()),
            **{name: last[name] for name in kept},
        }


def row_name(record: dict[str, Any]) -> str:
    return f"{record['task']}, {record['system']}, seed {record['seed']}"


def open_results(path: Path) -> ResultFile:
    return ResultFile(path, [], lambda records: map(row_name, records))


def read(path: Path) -> list[dict[str, Any]]:
    return open_results(path).content  # type: ignore[no-any-return]


def key(record: dict[str, Any]) -> tuple[str, str, int]:
    """What a run is the only one of."""
    return record["task"], record["system"], record["seed"]


def add(path: Path, record: dict[str, Any]) -> None:
    """Write a finished run into the file. All others stay, also those that another process has added meanwhile."""
    file = open_results(path)
    file.content = [*(other for other in file.content if key(other) != key(record)), record]
    file.save(row_name(record))


def run_all(options: Options, path: Path) -> None:
    found = set() if options.again else {key(record) for record in read(path)}
    waiting = [
        (task, system, seed)
        for seed in range(options.seeds)
        for task in options.tasks
        for system in options.systems
        if (task, system, seed) not in found
    ]
    began = time.perf_counter()
    running: list[Job] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                if options.max_minutes and time.perf_counter() - began > 60 * options.max_minutes:
                    print(f"out of time: {len(waiting) + len(running)} runs are missing", flush=True)
                    break
                while waiting and len(running) < options.jobs:
                    task, system, seed = waiting.pop(0)
                    folder = Path(scratch) / f"{task}-{system}-{seed}"
                    folder.mkdir()
                    running.append(Job(task, system, seed, folder, options.jobs))
                    running[-1].start(options.flags)
                time.sleep(POLL_SECONDS)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    if job.process.returncode:
                        raise SystemExit((job.folder / "log").read_text(encoding="utf-8"))
                    record = job.record()
                    add(path, record)
                    print(f"[{time.perf_counter() - began:.0f} s] {summary(record)}", flush=True)
        finally:
            for job in running:
                job.process.terminate()
            for job in running:
                job.process.wait()


def summary(record: dict[str, Any]) -> str:
    steps, score = record["curve"][-1]
    rate = record["agent_updates"] / record["wall_seconds"]
    name = f"{record['task']}, {record['system']}, seed {record['seed']}"
    return f"{name}: {score:.0f} at {steps} steps in {record['wall_seconds']:.0f} s ({rate:.0f} agent updates/s)"


# ---------------------------------------------------------------------------------------------- report


def best_by(record: dict[str, Any], steps: int) -> float | None:
    """The best return that was measured by then; None if the run did not come so far."""
    if record["curve"][-1][0] < steps:
        return None
    return float(max(score for at, score in record["curve"] if at <= steps))


def names_in(records: list[dict[str, Any]], what: str, order: Sequence[str]) -> list[str]:
    """The tasks or systems that there are results of, in this order."""
    return [name for name in order if any(record[what] == name for record in records)]


def markdown(records: list[dict[str, Any]]) -> str:
    lines = [
        "# How much MBPO learns from how few real steps",
        "",
        "Written by `benchmarks/sample_efficiency.py` from sample_efficiency.json. Best return measured by so many",
        "steps (a few episodes with the most likely actions); median over seeds (lowest – highest). *At the end* is",
        "the mean over seeds of the last return that was measured. Minutes are those of a whole run; the last column",
        "says how many went on at the same time.",
    ]
    for task in names_in(records, "task", tuple(TASKS)):
        goals = TASKS[task].goals
        wanted = "; ".join(f"{score:g} within {steps:,}" for steps, score in goals)
        lines += ["", f"## {task}", "", f"Wanted: {wanted}.", ""]
        heads = [f"by {steps:,} steps" for steps, _ in goals]
        more = "at the end | reached | agent updates/s | real steps dropped | minutes | runs at once"
        lines += [f"| mode | seeds | {' | '.join(heads)} | {more} |"]
        lines += ["| --- |" + " --- |" * (len(goals) + 7)]
        for system in SYSTEMS:
            runs = [record for record in records if (record["task"], record["system"]) == (task, system)]
            if not runs:
                continue
            cells, reached = [], []
            for steps, score in goals:
                scores = [found for record in runs if (found := best_by(record, steps)) is not None]
                spread = f"{median(scores):,.0f} ({min(scores):,.0f} – {max(scores):,.0f})" if scores else "–"
                cells.append(spread)
                reached.append(f"{sum(found >= score for found in scores)} of {len(runs)}")
            rate = median(record["agent_updates"] / record["wall_seconds"] for record in runs)
            dropped = median(record["dropped_steps"] for record in runs)
            last = fmean(record["curve"][-1][1] for record in runs)
            minutes = [record["wall_seconds"] / 60 for record in runs]
            at_once = {f"{record['at_once']}" if "at_once" in record else "–" for record in runs}
            row = [
                system,
                f"{len(runs)}",
                *cells,
                f"{last:,.0f}",
                ", ".join(reached),
                f"{rate:,.0f}",
                f"{dropped:,.0f}",
            ]
            row += [f"{median(minutes):.1f} ({min(minutes):.1f} – {max(minutes):.1f})", ", ".join(sorted(at_once))]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw a plot for each task: a faint line for each seed, the median of each system bold."""
    tasks = names_in(records, "task", tuple(TASKS))
    figure, plots = make_plots(len(tasks))
    for plot, task in zip(plots, tasks, strict=True):
        for number, system in enumerate(SYSTEMS):
            runs = [record for record in records if (record["task"], record["system"]) == (task, system)]
            by_step: dict[int, list[float]] = {}
            for record in runs:
                plot.plot(*zip(*record["curve"], strict=True), color=f"C{number}", alpha=0.2, linewidth=0.8)
                for steps, score in record["curve"]:
                    # Trials of different seeds come a few steps apart: those within a hundred steps belong together.
                    by_step.setdefault(round(steps, -2), []).append(score)
            points = [
                (steps, median(scores)) for steps, scores in sorted(by_step.items()) if 2 * len(scores) > len(runs)
            ]
            if points:
                plot.plot(*zip(*points, strict=True), color=f"C{number}", label=system, linewidth=2)
        if TASKS[task].reference:
            plot.plot(*zip(*TASKS[task].reference, strict=True), "k--", marker="o", label="original code", linewidth=1)
        plot.set(title=task, xlabel="real steps", ylabel="return (most likely actions)")
    save(figure, path)


def write_reports(folder: Path) -> str:
    file, picture = open_results(folder / "sample_efficiency.json"), folder / "sample_efficiency.png"
    if not is_drawn(picture):
        draw(file.content, picture)
    return write_report(folder / "sample_efficiency.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    path = options.output / "sample_efficiency.json"
    if not options.report_only:
        run_all(options, path)
    if path.exists():
        print(write_reports(options.output))


if __name__ == "__main__":
    main()
