"""Two checkouts of freerun beside each other: does a change cost speed?

Both train the same workload at the same time and take turns (see turn_taking.py), so that a machine that changes its
speed slows both alike. Straggler's environments sleep, and sleep on while a run is paused; so its runs follow each
other instead. A ratio above 1 means that the new checkout is faster.
"""

from __future__ import annotations

import contextlib
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro
from run_file import ResultFile, write_report
from turn_taking import TURN_SECONDS, Training, take_turns

WORKLOADS = {
    "straggler-100": "freerun/Straggler-v0 --num-workers 100 --segment-steps 25 --steps-per-update 10000",
    "halfcheetah-2": "HalfCheetah-v5 --num-workers 2 --envs-per-worker 4 --segment-steps 250 --steps-per-update 8000",
    "cartpole-2x32": "CartPole-v1 --num-workers 2 --envs-per-worker 32 --segment-steps 125 --steps-per-update 16000",
    "network-defence": "freerun/NetworkDefence-v0 --num-workers 2 --envs-per-worker 16 --segment-steps 50 "
    "--steps-per-update 8000",
    "tensors": "freerun/RoughDrone-v0 --env-args task hover --mode batch --num-envs 512 --num-steps-per-env 24",
}
LEARN_LITTLE = "--num-epochs 1 --minibatch-size 2500"
"""The learner works on few, large minibatches, so that collecting decides."""
SLEEPS = ("straggler-100",)


@dataclass(frozen=True)
class Options:
    before: tyro.conf.Positional[Path]
    """The src folder of the old checkout."""
    after: tyro.conf.Positional[Path]
    """The src folder of the new checkout."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Workloads to run; results of the others stay."""
    repeats: int = 6
    """Runs of each workload: an even number, because the order of the two checkouts alternates."""
    seconds: float = 10.0
    """Seconds of training that are measured, per run."""
    output: Path = Path(__file__).parent / "results" / "before_after"


def measure(workload: str, options: Options, new_first: bool) -> list[float]:
    """Steps per second before and after.

    Whoever takes the second turn is a few per cent faster (seen with both orders of the same two checkouts). So the
    order alternates from one repetition to the next.
    """
    flags = shlex.split(f"{WORKLOADS[workload]} {LEARN_LITTLE}")
    sources = (options.after, options.before) if new_first else (options.before, options.after)
    if workload in SLEEPS:
        rates = []
        for source in sources:
            with Training(flags, source) as training:
                training.warm_up()
                while not training.is_done(options.seconds):
                    training.go_on(TURN_SECONDS)
            rates.append(training.rate)
    else:
        with contextlib.ExitStack() as stack:
            trainings = [stack.enter_context(Training(flags, source)) for source in sources]
            take_turns(trainings, options.seconds)
        rates = [training.rate for training in trainings]
    return rates[::-1] if new_first else rates


def table(results: dict[str, list[list[float]]]) -> str:
    lines = [
        "Median rates of training; mean ratio of pairs of runs, lowest and highest.",
        "",
        "| workload | before (steps/s) | after (steps/s) | ratio | pairs |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, pairs in ((name, pairs) for name, pairs in results.items() if pairs):
        ratios = sorted(after / before for before, after in pairs)
        mean = statistics.geometric_mean(ratios)  # of an even number of pairs: what the order does cancels out
        before, after = (statistics.median(pair[place] for pair in pairs) for place in range(2))
        shown = f"{mean:.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})"
        lines.append(f"| {name} | {before:,.0f} | {after:,.0f} | {shown} | {len(pairs)} |")
    return "\n".join(lines) + "\n"


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "before_after.json", {})
    return write_report(folder / "before_after.md", table(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = ResultFile(options.output / "before_after.json", {})
    results: dict[str, list[list[float]]] = file.content
    results.update({name: [] for name in options.workloads})
    for repetition in range(options.repeats):
        for name in options.workloads:
            before, after = measure(name, options, new_first=repetition % 2 == 1)
            results[name].append([before, after])
            print(f"{name}: {before:,.0f} -> {after:,.0f} steps/s, ratio {after / before:.3f}", flush=True)
            file.save(name)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
