"""How long does each system train until it reaches a score, on the same cores with the same hyper-parameters?

Reached: after an update, the mean return of the last 100 training episodes (at least 20) is no less than the score. The
clock starts when everything is built and nothing has been stepped. Every run is a process of its own on cores of its
own; finished runs are kept in time_to_score.json, so an interrupted benchmark continues. Runs that were measured with
other sources are made again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from pictures import is_drawn
from run_file import write_report
from time_to_score_report import Record, Table, draw, markdown
from time_to_score_runs import Job, Plan, Results
from time_to_score_systems import REFERENCE, SYSTEMS, TASKS, why_absent

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = tuple(TASKS)
    """What is learned."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Who learns it."""
    seeds: int = 5
    """Runs of each: seeds 0, 1, …"""
    cores_per_run: int = 2
    """Cores that a run is bound to."""
    parallel: int = 1
    """Runs at a time, each on cores of its own."""
    max_seconds: float | None = None
    """End runs after so many seconds instead of their task's limit, for a quick try."""
    max_minutes: float | None = None
    """End the benchmark by then; what is missing is run by the next call."""
    output: Path = Path(__file__).parent / "results" / "time_to_score"
    """Folder for time_to_score.json, time_to_score.md and time_to_score.png."""
    report_only: bool = False
    """Write time_to_score.md and time_to_score.png again from time_to_score.json, run nothing."""
    fresh: bool = False
    """Run everything again, also what time_to_score.json already holds."""

    def __post_init__(self) -> None:
        for chosen, known in ((self.tasks, TASKS), (self.systems, SYSTEMS)):
            if unknown := set(chosen) - set(known):
                raise SystemExit(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        if min(self.seeds, self.cores_per_run, self.parallel) < 1:
            raise SystemExit("--seeds, --cores-per-run and --parallel must be at least 1")

    def core_sets(self) -> list[tuple[int, ...]]:
        """Disjoint cores for each of the runs at a time."""
        if not hasattr(os, "sched_setaffinity"):
            raise SystemExit("runs are bound to cores, which takes Linux; --report-only works everywhere")
        cores = sorted(os.sched_getaffinity(0))
        if self.parallel * self.cores_per_run > len(cores):
            raise SystemExit(
                f"--parallel {self.parallel} × --cores-per-run {self.cores_per_run} needs more than the "
                f"{len(cores)} cores that there are: lower one of them"
            )
        starts = range(0, self.parallel * self.cores_per_run, self.cores_per_run)
        return [tuple(cores[start : start + self.cores_per_run]) for start in starts]


def plans(options: Options) -> list[Plan]:
    """Seed by seed, so that an unfinished benchmark covers all; long tasks first, and the systems in turn."""
    tasks = sorted(options.tasks, key=lambda name: -TASKS[name].max_seconds)
    return [
        Plan(task, system, seed, options.max_seconds or TASKS[task].max_seconds, options.cores_per_run)
        for seed in range(options.seeds)
        for task in tasks
        for system in options.systems
    ]


# ---------------------------------------------------------------------------------------------- all runs


def run_all(options: Options, results: Results) -> None:
    began = time.perf_counter()
    wanted = [plan for plan in plans(options) if why_absent(plan.system, plan.task) is None]
    for reason in sorted({why_absent(plan.system, plan.task) or "" for plan in plans(options) if plan not in wanted}):
        print(reason, flush=True)
    if options.fresh:
        for old in wanted:
            results.forget(old)
    current = [record for record in results.records if results.is_current(record)]
    waiting = [plan for plan in wanted if not any(map(plan.is_fulfilled_by, current))]
    print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} of them already in {results.path}", flush=True)
    free_cores = options.core_sets()
    running: list[Job] = []

    def seconds_left() -> float:
        return (options.max_minutes or float("inf")) * 60 - (time.perf_counter() - began)

    def next_plan() -> Plan | None:
        return next((plan for plan in waiting if results.expected_seconds(plan) < seconds_left()), None)

    try:
        while seconds_left() > 0:
            while free_cores and (plan := next_plan()) is not None:
                waiting.remove(plan)
                running.append(Job(plan, free_cores.pop(0), options.parallel))
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for job in [job for job in running if not job.follow()]:
                running.remove(job)
                free_cores.append(job.cores)
                print(f"[{time.perf_counter() - began:.0f} s] {job.finish(results)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept")
    finally:
        for job in running:
            job.abandon()
    if num_missing := len(waiting) + len(running):
        print(f"{num_missing} runs are missing: the same command continues with them", flush=True)


def report_on(options: Options, results: Results) -> str:
    wanted = plans(options)
    found = {plan: record for plan in wanted for record in results.records if plan.is_fulfilled_by(record)}

    def rows(task: str) -> Iterator[tuple[str, list[Record]]]:
        """The runs of each system that has some."""
        for system in options.systems:
            records = [record for plan, record in found.items() if (plan.task, plan.system) == (task, system)]
            if records:
                yield SYSTEMS[system].label, records

    tables = [
        Table(
            name,
            TASKS[name].score,
            f"{TASKS[name].max_steps:,} steps or {options.max_seconds or TASKS[name].max_seconds:g} s",
            SYSTEMS[REFERENCE].label,
            dict(rows(name)),
            options.seeds,
        )
        for name in options.tasks
    ]
    remarks = [f"{len(found)} of {len(wanted)} runs are in."]
    if others := len(results.records) - len(found):
        remarks.append(f"Left out: {others} runs in time_to_score.json under other conditions, or not asked for.")
    remarks += [f"Failed: {failure['run']}; time_to_score.json holds its log." for failure in results.failures]
    picture = results.path.with_suffix(".png")
    if found and not is_drawn(picture):
        draw(tables, picture)
    return write_report(results.path.with_suffix(".md"), markdown(tables, remarks), results.stamped())


def write_reports(folder: Path) -> str:
    return report_on(Options(), Results(folder / "time_to_score.json"))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs have sessions of their own and would go on
    results = Results(options.output / "time_to_score.json")
    if not options.report_only:
        run_all(options, results)
    print(report_on(replace(options, tasks=tuple(TASKS), systems=tuple(SYSTEMS)), results))
    if results.failures:
        raise SystemExit(f"{len(results.failures)} runs failed; their logs are in {results.path}")


if __name__ == "__main__":
    main()
