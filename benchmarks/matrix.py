"""Writes the table that says which mode suits which use case. Each use case is represented by one environment.

The table comes from the results of `freerun bench`, `cyber.py`, `tensor_modes.py` and `overlap.py` in
benchmarks/results. With `--run`, every use case of `freerun bench` that has no report yet is measured first, which
takes less than a quarter of an hour in all; `--again` also measures those that have one. The table advises the fastest
mode. Where the runs of several modes overlap, it advises the one that `--mode auto` would prefer, and says so.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from run_file import add_stamp, read_content, stamps_in, write_report
from tensor_modes import NUM_STEPS

from freerun.settings.registry import find_mode
from freerun.tools.bench import analysis, noise, text_report
from freerun.tools.bench.analysis import factor, percent
from freerun.tools.bench.bench_options import ALL, BenchOptions
from freerun.tools.bench.bench_run import bench
from freerun.tools.bench.results import Results

HERE = Path(__file__).parent / "results"
MANY_PER_WORKER = "freerun:envs_per_worker=32:segment_steps=125"
"""The settings that the README advises for quick environments."""


@dataclass(frozen=True)
class Contender:
    """A mode with its settings, its steps per second in each run, and the limit for them."""

    label: str
    rates: list[float]
    limit: float

    @property
    def mode(self) -> str:
        return self.label.partition(":")[0]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Measured:
    """All modes that were measured for one use case."""

    contenders: list[Contender]
    unit: str
    what: str
    """The environment and the number of workers or environments."""
    limit_name: str
    spread: float | None
    """How much the limit varied between its runs. Smaller differences than this mean nothing."""
    report: str
    caveat: str = ""


@dataclass(frozen=True)
class UseCase:
    """A line of the table."""

    name: str
    read: Callable[[Path], Measured]
    folder: str
    """The folder in benchmarks/results that holds the measurement."""
    bench: dict[str, Any] = field(default_factory=dict)
    """The options of `freerun bench`; empty if another script measures this use case."""


# ---------------------------------------------------------------------------------------------- what was measured


def of_bench(folder: Path) -> Measured:
    """Read a report of `freerun bench`; its largest number of workers counts."""
    results = Results.read(folder)
    number = results.options.numbers()[-1]
    limit = analysis.limits(results, number)
    if limit is None:
        raise SystemExit(f"{folder} lacks the bare limit of {number} workers: measure it again with --again")
    contenders = [
        Contender(case.label, case.values("steps_per_second"), limit.bare.middle)
        for case in results.measured_with(number)
    ]
    found = analysis.machine_noise(results)
    caveat = "" if found is None or found.word == "quiet" else f"the machine was {found.word}"
    what = f"{results.options.env}, {analysis.workers_text(number)}"
    return Measured(contenders, "steps/s", what, "the bare limit", limit.spread, "report.md", caveat)


def of_cyber(folder: Path) -> Measured:
    """Read the results of cyber.py, which measured the limit next to each stretch of training.

    A stretch counts as its share of its own limit times the median limit, so that changes in the speed of the machine
    cancel out. The quartiles of these rates stand for the runs.
    """
    found = read_content(folder / "cyber-cage2-v0.json")
    training = {
        mode: [stretch for run in runs["training"] for stretch in run["stretches"]]
        for mode, runs in found["modes"].items()
    }
    limit = statistics.median(stretch["limit"] for stretches in training.values() for stretch in stretches)
    contenders = [
        Contender(mode, statistics.quantiles([it["steps_per_second"] / it["limit"] * limit for it in stretches]), limit)
        for mode, stretches in training.items()
        if stretches
    ]
    what = f"{found['env']}, {analysis.workers_text(found['num_workers'])}"
    return Measured(contenders, "steps/s", what, "the bare limit", 0.0, "cyber-cage2-v0.md")


def of_tensors(folder: Path) -> Measured:
    """Read the results of tensor_modes.py; its largest number of environments counts."""
    found = read_content(folder / "tensor_modes.json")
    case = found["cases"][-1]
    runs: dict[str, list[float]] = case["runs"]
    steps = case["num_envs"] * found["num_updates"] * NUM_STEPS
    ideal = max(statistics.median(runs[part]) for part in ("collect", "learn"))
    contenders = [
        Contender(mode, [steps / seconds for seconds in runs[mode]], steps / ideal)
        for mode in ("sync", "batch", "continuous")
    ]
    what = f"freerun/RoughDrone-v0 × {case['num_envs']:,} on one {found['machine']}"
    return Measured(
        contenders, "steps/s", what, "the ideal max(Tc, Tl)", noise.relative_spread(runs["collect"]), "tensor_modes.md"
    )


def of_overlap(folder: Path) -> Measured:
    """Read the results of overlap.py."""
    found = read_content(folder / "overlap.json")
    options = found["options"]
    labels = {"in turn (batch, --max-lag 0)": "batch:max_lag=0", "v2 (batch)": "batch", "v1 (continuous)": "continuous"}
    steps = float(options["total_steps"])
    contenders = []
    for way, runs in found["ways"].items():
        ideal = max(statistics.median(runs[part]) for part in ("collect", "learn"))
        contenders.append(Contender(labels[way], [steps / seconds for seconds in runs["both"]], steps / ideal))
    alone = found["ways"]["v2 (batch)"]["learn"]
    what = f"{options['env']} × {options['num_envs']}, {options['algo']}, {found['machine']}"
    return Measured(contenders, "steps/s", what, "the ideal max(Tc, Tl)", noise.relative_spread(alone), "overlap.md")


USE_CASES = (
    UseCase(
        "steps are slow and uneven (a simulator that waits, a server, a licence)",
        of_bench,
        "bench_straggler",
        {"env": "freerun/Straggler-v0", "workers": "100", "max_minutes": 4.5},
    ),
    UseCase(
        "steps are quick (classic control, toy and grid worlds)",
        of_bench,
        "bench_cartpole",
        {"env": "CartPole-v1", "modes": f"{ALL},{MANY_PER_WORKER}", "workers": "2", "max_minutes": 3.0},
    ),
    UseCase(
        "steps compute on a CPU (physics)",
        of_bench,
        "bench_halfcheetah",
        {"env": "HalfCheetah-v5", "modes": f"{ALL},{MANY_PER_WORKER}", "workers": "2", "max_minutes": 3.0},
    ),
    UseCase(
        "cyber defence, the built-in network",
        of_bench,
        "bench_network_defence",
        {"env": "freerun/NetworkDefence-v0", "modes": f"{ALL},{MANY_PER_WORKER}", "workers": "2", "max_minutes": 3.0},
    ),
    UseCase("cyber defence, CybORG", of_cyber, "cyber"),
    UseCase("thousands of environments as tensors on a GPU", of_tensors, "tensor_modes"),
    UseCase("a simulator on the CPU, an off-policy or model-based learner on a GPU", of_overlap, "overlap"),
)


# ---------------------------------------------------------------------------------------------- the advice


@dataclass(frozen=True)
class Advice:
    """The mode to use, and those that it was compared with."""

    contender: Contender
    equals: list[Contender]
    """The other modes whose runs overlap with those of the fastest."""
    next: Contender | None
    """The fastest of the slower modes."""


def why_not_auto(mode: str) -> str | None:
    """Return the reason why `--mode auto` never chooses a mode; None where it may."""
    return find_mode(mode).traits.why_not_auto


def advise(measured: Measured) -> Advice:
    """Choose the fastest mode, or the one that `--mode auto` would prefer among those within the noise of the fastest.

    Modes that `auto` never chooses (they drop steps, or are for several machines) are chosen only if there is no other.
    """
    able = [found for found in measured.contenders if why_not_auto(found.mode) is None] or measured.contenders
    ranges = {found.label: noise.Range.of(found.rates, measured.spread) for found in able}
    fastest = max(able, key=lambda found: found.rate)
    equals = [found for found in able if not ranges[fastest.label].is_above(ranges[found.label])]
    chosen = min(equals, key=lambda found: (find_mode(found.mode).traits.preference, -found.rate))
    slower = [found for found in able if found not in equals]
    return Advice(
        chosen,
        sorted((found for found in equals if found is not chosen), key=lambda found: -found.rate),
        max(slower, key=lambda found: found.rate, default=None),
    )


def why(measured: Measured, advice: Advice) -> str:
    """Say how fast the advised mode is, compared with its limit and the other modes."""
    best = advice.contender
    parts = [f"{rate_text(best.rate)} {measured.unit}, {percent(best.rate / best.limit)} of {measured.limit_name}"]
    if advice.equals:
        names = ", ".join(f"`{found.label}` ({rate_text(found.rate)})" for found in advice.equals)
        parts.append(f"within the noise of {names}")
    if advice.next is not None and advice.next.rate < best.rate:
        parts.append(f"{factor(best.rate / advice.next.rate)} the next, `{advice.next.label}`")
    left_out = [found for found in measured.contenders if why_not_auto(found.mode) and found is not best]
    parts += [f"`{found.label}` made {rate_text(found.rate)}, but {why_not_auto(found.mode)}" for found in left_out]
    return "; ".join([*parts, *([measured.caveat] if measured.caveat else [])])


def rate_text(rate: float) -> str:
    return f"{rate / 1e6:.1f} million" if rate >= 1e6 else f"{rate:,.0f}"


def flags(label: str) -> str:
    """Return the flags of `freerun train` for a mode and its settings."""
    mode, *settings = label.split(":")
    words = [f"--{name.replace('_', '-')} {value}" for name, _, value in (each.partition("=") for each in settings)]
    return " ".join([f"--mode {mode}", *words])


def table(cases: Sequence[UseCase], results: Path) -> str:
    lines = [
        "# Which mode?",
        "",
        "Drawn from measurements alone: `benchmarks/matrix.py` wrote this. Each use case is stood for by one",
        "environment; the report behind it names the machine. What holds for yours, `freerun bench` measures and",
        "`freerun probe` predicts.",
        "",
        "| use case | mode | why | measured on |",
        "| --- | --- | --- | --- |",
    ]
    missing = []
    for case in cases:
        if not any((results / case.folder).glob("*.json")):
            missing.append(case)
            continue
        measured = case.read(results / case.folder)
        advice = advise(measured)
        link = f"[{measured.what}](../{case.folder}/{measured.report})"
        lines.append(f"| {case.name} | `{flags(advice.contender.label)}` | {why(measured, advice)} | {link} |")
    lines += [
        "",
        "*Within the noise*: the runs of the two overlap, each taken at least as wide as the spread of the limit",
        "between its runs; the mode that `--mode auto` prefers is named then. The *bare limit* is as many processes",
        "that only step environments; the *ideal* is the longer of collecting and learning alone, as if the other",
        "cost nothing.",
    ]
    if missing:
        names = "; ".join(case.name for case in missing)
        lines += ["", f"Not measured yet: {names} (`python benchmarks/matrix.py --run`)."]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- the script


@dataclass(frozen=True)
class Options:
    run: bool = False
    """Measure the use cases of `freerun bench` that have no report yet."""
    again: bool = False
    """Measure those anew that have one, too."""
    only: tuple[str, ...] = ()
    """Measure only these folders, such as bench_cartpole."""
    max_minutes: float | None = None
    """For each use case (if not given: 4.5 for Straggler, 3 for the others)."""
    results: Path = HERE
    """Where reports are read and written."""


def measure(case: UseCase, options: Options) -> None:
    """Run `freerun bench` and keep report.json and report.md. The HTML page is large and can be made again."""
    settings = {**case.bench, **({} if options.max_minutes is None else {"max_minutes": options.max_minutes})}
    with tempfile.TemporaryDirectory() as folder:
        bench(BenchOptions(**settings, output=Path(folder)), lambda line: print(line, file=sys.stderr, flush=True))
        target = options.results / case.folder
        target.mkdir(parents=True, exist_ok=True)
        add_stamp(Path(folder) / "report.json", target / "report.json", "all")
        write_reports(target)


def write_reports(folder: Path) -> None:
    """Write the page of one use case, and the table of all."""
    text = text_report.markdown(Results.read(folder))
    write_report(folder / "report.md", text, stamps_in(folder / "report.json"))
    write_table(folder.parent)


def write_table(results: Path) -> str:
    """Write the table of all use cases, also of those that were not measured yet."""
    text = table(USE_CASES, results)
    (results / "matrix").mkdir(parents=True, exist_ok=True)
    (results / "matrix" / "matrix.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    unknown = set(options.only) - {case.folder for case in USE_CASES if case.bench}
    if unknown:
        raise SystemExit(f"--only knows {', '.join(case.folder for case in USE_CASES if case.bench)}")
    for case in USE_CASES:
        chosen = case.folder in options.only if options.only else True
        is_there = (options.results / case.folder / "report.json").exists()
        if case.bench and chosen and (options.again or (options.run and not is_there)):
            measure(case, options)
    for case in USE_CASES:
        if case.bench and (options.results / case.folder).is_dir():
            write_reports(options.results / case.folder)
    print(write_table(options.results))


if __name__ == "__main__":
    main()
