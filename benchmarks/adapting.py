"""Whether `--adapt` gets out of a bad setting: 2 workers on Straggler, a queue of 1, 64 workers on CartPole.

For each case the hand-tuned settings are measured first, in turns and repeated; then the best of them again, for as
long as the run that starts at the bad setting with `--adapt`, in turns with it. Every run is a process of its own that
is interrupted after so many seconds. What counts is the steps/s after the first minute of both: an environment whose
episodes grow longer as the policy learns is faster then. `--cases` measures some again and keeps the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro
from run_file import ResultFile, write_report

WANTED = 0.9
WITHIN_SECONDS = 60.0
FEWEST_UPDATES = 3
SLIDING_SECONDS = 6.0
"""The speed at a moment is that of so many seconds around it."""


@dataclass(frozen=True)
class Case:
    about: str
    env: str
    flags: str
    bad: str
    by_hand: tuple[str, ...]
    """What a person would try; the bad setting is measured too."""


LIGHT = "--num-epochs 2 --minibatch-size 512"
QUICK = "--env-args mean_seconds 0.0002 tail_seconds 0.001"
"""Straggler as fast as the learner, so that it matters whether the two wait for each other; it sleeps, so that they do
not for a core."""
CASES = {
    "straggler": Case(
        "2 workers on Straggler",
        "freerun/Straggler-v0",
        f"--mode freerun --max-lag 2 {LIGHT}",
        "--num-workers 2",
        ("--num-workers 8", "--num-workers 16", "--num-workers 32", "--num-workers 64"),
    ),
    "batch-queue": Case(
        "a queue of 1, `batch`",
        "freerun/Straggler-v0",
        f"{QUICK} --mode batch --num-envs 16 --num-steps-per-env 8 --steps-per-update 2048 --max-lag 2 --num-epochs 6",
        "--max-queue-size 1",
        ("--max-queue-size 4", "--max-queue-size 16", "--max-queue-size 64"),
    ),
    "continuous-queue": Case(
        "a queue of 1, `continuous`",
        "freerun/Straggler-v0",
        f"{QUICK} --mode continuous --num-collectors 2 --num-envs 8 --collection-batch-size 64 --steps-per-update 2048 "
        "--collector-kind process --num-epochs 6",
        "--max-queue-size 1",
        ("--max-queue-size 4", "--max-queue-size 16", "--max-queue-size 64"),
    ),
    "cartpole": Case(
        "64 workers on CartPole",
        "CartPole-v1",
        f"--mode freerun {LIGHT}",
        "--num-workers 64",
        (
            "--num-workers 1",
            "--num-workers 2",
            "--num-workers 4",
            "--num-workers 16",
            "--num-workers 2 --envs-per-worker 8",
        ),
    ),
    "cartpole-default": Case(
        "64 workers on CartPole, PPO's own settings",
        "CartPole-v1",
        "--mode freerun",
        "--num-workers 64",
        ("--num-workers 1", "--num-workers 2", "--num-workers 4", "--num-workers 16"),
    ),
}


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = tuple(CASES)
    """Which to measure."""
    repeats: int = 2
    """Runs of every setting by hand, and of the adapted one."""
    seconds: float = 15.0
    """Of a run by hand; the first third is left out."""
    adapt_seconds: float = 80.0
    """Of an adapted run, and of the best by hand beside it; what comes after the first minute counts."""
    by_hand: bool = True
    """Measure what there is by hand; without, only the best that was found before and the adapted run."""
    output: Path = Path(__file__).parent / "results" / "adapting"
    """Folder for adapting.json and adapting.md."""


@dataclass
class Adapted:
    """A run that began at the bad setting."""

    reached: float
    """Steps/s after the first minute."""
    at_first: float
    seconds_to_wanted: float | None = None
    """Until the speed was 90 % of the best by hand for the first time."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    """At the end, what was moved and where it has come to rest."""


@dataclass
class Result:
    case: str
    by_hand: dict[str, list[float]] = field(default_factory=dict)
    """Steps/s of each setting; the bad one is among them."""
    best_later: list[float] = field(default_factory=list)
    """Of the best of them, after the first minute."""
    adapted: list[Adapted] = field(default_factory=list)

    @property
    def best(self) -> tuple[str, float]:
        found = {flags: statistics.median(rates) for flags, rates in self.by_hand.items()}
        flags = max(found, key=found.__getitem__)
        return flags, found[flags]


Records = list[dict[str, Any]]


def train(case: Case, flags: str, seconds: float) -> tuple[Records, list[dict[str, Any]]]:
    """The records of a run that is interrupted `seconds` after it has begun, and what --adapt did."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [case.env, *shlex.split(case.flags), *shlex.split(flags), "--total-steps", "1000000000"]
        words += ["--checkpoint-every", "never", "-q", "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "freerun", "train", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60.0
            while not (run_dir / "timeline.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            while process.poll() is None and num_lines(run_dir) < FEWEST_UPDATES and time.monotonic() < deadline:
                time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if run_dir.exists() else []
        told = run_dir / "adapting.jsonl"
        changes = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    if len(lines) < FEWEST_UPDATES:
        raise SystemExit(f"{shlex.join(command)} came to nothing:\n{errors}")
    return [json.loads(line) for line in lines], changes


def num_lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rate(records: Records, start: float, stop: float) -> float:
    """Steps/s between the updates that lie nearest to two moments."""
    moments = [(0.0, 0), *((record["wall_seconds"], record["step"]) for record in records)]
    first = min(moments, key=lambda moment: abs(moment[0] - start))
    last = min(moments, key=lambda moment: abs(moment[0] - stop))
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def adapted(case: Case, options: Options, best: float) -> Adapted:
    records, changes = train(case, f"{case.bad} --adapt", options.adapt_seconds)
    end = records[-1]["wall_seconds"]
    half = SLIDING_SECONDS / 2
    moments = [half + step for step in range(int(end - SLIDING_SECONDS) + 1)]
    rates = [(moment, rate(records, moment - half, moment + half)) for moment in moments]
    until = next((moment for moment, value in rates if value >= WANTED * best), None)
    values = {name[8:]: records[-1][name] for name in records[-1] if name.startswith("adapted_")}
    return Adapted(rate(records, WITHIN_SECONDS, end), rates[0][1], until, rates, changes, values)


def measure(name: str, options: Options, before: Result | None) -> Result:
    case = CASES[name]
    result = Result(name)
    if not options.by_hand:
        if before is None:
            raise SystemExit(f"nothing was measured by hand for {name}: leave --no-by-hand out")
        result.by_hand = before.by_hand
    for repeat in range(options.repeats if options.by_hand else 0):
        for flags in (case.bad, *case.by_hand):
            records, _ = train(case, flags, options.seconds)
            value = rate(records, options.seconds / 3, records[-1]["wall_seconds"])
            result.by_hand.setdefault(flags, []).append(value)
            print(f"[{repeat + 1}/{options.repeats}] {name} {flags}: {value:,.0f} steps/s", flush=True)
    flags, _ = result.best
    for repeat in range(options.repeats):
        records, _ = train(case, flags, options.adapt_seconds)
        best = rate(records, WITHIN_SECONDS, records[-1]["wall_seconds"])
        result.best_later.append(best)
        found = adapted(case, options, best)
        result.adapted.append(found)
        print(
            f"[{repeat + 1}/{options.repeats}] {name} --adapt: {found.at_first:,.0f} at first, {found.reached:,.0f} "
            f"steps/s after a minute ({found.reached / best:.0%} of {best:,.0f} with {flags}), {found.values}",
            flush=True,
        )
    return result


def table(results: list[Result], cores: int, options: Options) -> str:
    lines = [
        f"`--adapt` from a bad setting, {cores} cores, PPO; steps/s, medians. The best by hand is found in "
        f"runs of {options.seconds:g} s; it and the adapted run then last {options.adapt_seconds:g} s, and what comes "
        "after the first minute counts.",
        "",
        "| start | bad setting | best by hand | `--adapt` | of the best | 90 % after | comes to rest at |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        case = CASES[result.case]
        flags, early = result.best
        best = statistics.median(result.best_later) if result.best_later else early
        early_only = "" if result.best_later else f", of its first {options.seconds:g} s"
        reached = statistics.median(run.reached for run in result.adapted)
        until = [run.seconds_to_wanted for run in result.adapted]
        soon = f"{max(seconds for seconds in until if seconds is not None):.0f} s" if all(until) else "not always"
        values = "; ".join(
            ", ".join(f"{name} {value:g}" for name, value in run.values.items()) for run in result.adapted
        )
        lines.append(
            f"| {case.about} | {statistics.median(result.by_hand[case.bad]):,.0f} "
            f"| {best:,.0f} (`{flags}`{early_only}) | {reached:,.0f} | {reached / best:.0%} | {soon} | {values} |"
        )
    lines += ["", "| case | flags | by hand, steps/s (each run) |", "| --- | --- | --- |"]
    for result in results:
        each = "; ".join(f"`{flags}` {_list(rates)}" for flags, rates in result.by_hand.items())
        lines.append(f"| {result.case} | `{CASES[result.case].env} {CASES[result.case].flags}` | {each} |")
    return "\n".join(lines) + "\n"


def _list(rates: list[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in rates)


def kept(file: ResultFile) -> dict[str, Result]:
    """What was measured before."""
    return {
        entry["case"]: Result(**{**entry, "adapted": [Adapted(**run) for run in entry["adapted"]]})
        for entry in file.content["results"]
    }


def open_results(folder: Path) -> ResultFile:
    return ResultFile(
        folder / "adapting.json", {"results": []}, lambda found: [one["case"] for one in found["results"]]
    )


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    text = table(list(kept(file).values()), file.content["machine"]["cores"], Options())
    return write_report(folder / "adapting.md", text, file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = open_results(options.output)
    results = kept(file)
    for name in options.cases:
        results[name] = measure(name, options, results.get(name))
        there = [results[case] for case in CASES if case in results]
        file.content = {"machine": {"cores": os.cpu_count()}, "results": [asdict(result) for result in there]}
        file.save(name)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
