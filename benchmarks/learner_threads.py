"""What does `--learner-threads auto` gain beside one thread?

Each case is a whole command with all its outputs; its speed is that of its last two thirds, as in default_flags.py.
Both ways take turns, and a result is their ratio within one repetition. SAC computes in numpy, which `auto` leaves with
one thread. In the last case the workers keep all cores busy, so that there is nothing to gain, and nothing should be
lost. Breakout needs `pip install 'freerun[atari]'`.
"""

from __future__ import annotations

import importlib.util
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from default_flags import Case, train
from run_file import ResultFile, write_report

BREAKOUT = "PPO from pixels, Breakout × 8"
CASES = {
    "SAC, HalfCheetah": Case("HalfCheetah-v5", 1, ("--algo", "sac", "--total-steps", "10000")),
    BREAKOUT: Case(
        "ALE/Breakout-v5", 8, ("--preset", "atari-breakout", "--num-workers", "8", "--total-steps", "12288")
    ),
    "PPO with a memory, HalfCheetah × 2": Case(
        "HalfCheetah-v5", 2, ("--memory", "gru", "--num-workers", "2", "--total-steps", "150000")
    ),
    "PPO by torch, HalfCheetah × 2, cores full": Case(
        "HalfCheetah-v5",
        2,
        ("--learner", "torch", "--num-epochs", "1", "--num-workers", "2", "--total-steps", "250000"),
    ),
}
WAYS = ("1", "auto")


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = tuple(CASES)
    """What is measured; results of the others stay."""
    repeats: int = 5
    output: Path = Path(__file__).parent / "results" / "learner_threads"


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "Steps per second of a whole training with one thread of the learner and with `--learner-threads auto`, on two "
        "cores: median (lowest – highest). `benchmarks/learner_threads.py` wrote this.",
        "",
        "| | 1 thread | `auto` | `auto` / 1 thread | repetitions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in (name for name in CASES if name in results):
        one, auto = (results[name][way] for way in WAYS)
        ratios = [more / fewer for more, fewer in zip(auto, one, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(one):,.0f} | {statistics.median(auto):,.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f}) | {len(ratios)} |"
        )
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "learner_threads.json", {})
    return write_report(folder / "learner_threads.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = ResultFile(options.output / "learner_threads.json", {})
    cases = [name for name in options.cases if name != BREAKOUT or importlib.util.find_spec("ale_py")]
    for name in set(options.cases) - set(cases):
        print(f"{name} is left out: ale-py is not installed")
    measured: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in cases}
    for _ in range(options.repeats):
        for name in cases:
            for way in WAYS:
                case = CASES[name]
                with_threads = Case(case.env, case.num_processes, (*case.flags, "--learner-threads", way))
                measured[name][way].append(train(with_threads).steps_per_second)
                print(f"{name}, {way}: {measured[name][way][-1]:,.0f} steps/s", flush=True)
    file.content.update(measured)
    file.save(*cases)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
