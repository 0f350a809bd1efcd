"""Makes results of a bench with figures that are easy to check by hand."""

from __future__ import annotations

from typing import Any

from freerun.tools.bench.bench_options import BenchOptions
from freerun.tools.bench.results import Case, Results

MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_gigabytes": 8.0,
    "system": "Linux",
    "python": "3.11",
    "freerun": "0",
}


def run(steps_per_second: float, **more: float) -> dict[str, float]:
    """Return a run with episodes of 100 steps on a quiet machine."""
    figures = {
        "steps_per_second": steps_per_second,
        "episodes_per_second": steps_per_second / 100,
        "startup_seconds": 1.0,
        "memory_megabytes": 300.0,
        "cpu_percent": 50.0,
        "others_percent": 0.0,
        "workers_busy_share": 0.9,
        "learner_updating_share": 0.2,
        "wall_seconds": 10.0,
    }
    return {**figures, **more}


def bare(steps_per_second: float, **more: float) -> dict[str, float]:
    return run(steps_per_second, episode_steps=100.0, cpu_seconds_per_step=0.0001, **more)


def case(label: str, num_workers: int, *rates: float, **more: float) -> Case:
    return Case(label, num_workers, 1000, [run(rate, **more) for rate in rates])


def results(*cases: Case, **options: Any) -> Results:
    """Return results with a bare limit of 100 steps/s for one worker and 1,000 for ten, each within 2 %."""
    limits = [
        Case("bare", 1, 0, [bare(99), bare(100), bare(101)]),
        Case("bare", 10, 0, [bare(990), bare(1000), bare(1010)]),
    ]
    given = BenchOptions("Toy-v0", workers="10", **options)
    return Results(given, MACHINE, [*limits, *cases], "finished", 60.0, "2026-01-01 12:00")
