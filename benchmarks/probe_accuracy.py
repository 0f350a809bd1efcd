"""How far `freerun probe` is from what happens: every mode for a few seconds at the number of workers predicted best.

Probes and runs are processes of their own, interleaved (each repetition probes and runs every mode once) and repeated;
the table shows medians. `auto` is judged by the mode and the workers that the probe recommends: how far what they
really do is from the best mode measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

WARM_UP_SHARE = 0.3
"""Of a run's updates; and at least two."""
FEWEST_UPDATES = 3
NEVER_CHOSEN = ("ray", "continuous")
"""Modes that `auto` leaves out unless they are asked for."""


@dataclass(frozen=True)
class Options:
    envs: tuple[str, ...] = ("freerun/Straggler-v0", "CartPole-v1", "HalfCheetah-v5", "freerun/NetworkDefence-v0")
    """Environments."""
    cyborg_path: Path | None = None
    """The folder that holds the CybORG package: adds cyborg/CAGE2-v0."""
    modes: tuple[str, ...] = ("sequential", "sync", "pipes", "executor", "freerun", "ray", "continuous", "batch")
    """Modes."""
    repeats: int = 3
    """How often each environment is probed and each mode run."""
    seconds: float = 6.0
    """How long a run is meant to take, by the prediction."""
    flags: str = ""
    """Further flags for both, such as "--num-epochs 4 --minibatch-size 2048"."""
    output: Path = Path(__file__).parent / "results" / "probe_accuracy"
    """Folder for probe_accuracy.json and probe_accuracy.md."""


@dataclass
class Case:
    """A mode of an environment: predicted and measured steps per second."""

    env: str
    mode: str
    num_workers: int
    predicted: list[float]
    measured: list[float]

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1


@dataclass
class Chosen:
    """What a probe recommended for an environment, and the seconds it took."""

    env: str
    mode: str
    num_workers: int
    probe_seconds: float


def freerun(*words: str, timeout: float = 300.0) -> str:
    command = [sys.executable, "-m", "freerun", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stderr}")
    return done.stdout


def best_of(found: dict[str, Any], mode: str) -> dict[str, Any] | None:
    able = [entry for entry in found["predictions"] if entry["mode"] == mode and entry["steps_per_second"]]
    return max(able, key=lambda entry: float(entry["steps_per_second"]), default=None)


def predicted(found: dict[str, Any], mode: str, num_workers: int) -> float | None:
    for entry in found["predictions"]:
        if entry["mode"] == mode and entry["num_workers"] == num_workers:
            return entry["steps_per_second"]  # type: ignore[no-any-return]
    return None


def run(env: str, case: Case, steps_per_update: int, options: Options, extra: list[str]) -> float:
    """Steps per second of a real training, without its first updates."""
    steps = max(int(options.seconds * case.predicted[-1]), FEWEST_UPDATES * steps_per_update)
    workers = {
        "continuous": ["--num-collectors", str(case.num_workers)],
        "sequential": [],
        "batch": [],
    }.get(case.mode, ["--num-workers", str(case.num_workers)])
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        quiet = ["--total-steps", str(steps), "--checkpoint-every", "never", "-q", "--run-dir", str(run_dir)]
        freerun("train", env, "--mode", case.mode, *workers, *extra, *quiet)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first = records[min(len(records) - 2, max(1, int(WARM_UP_SHARE * len(records))))]
    last = records[-1]
    return (last["step"] - first["step"]) / (last["wall_seconds"] - first["wall_seconds"])  # type: ignore[no-any-return]


def measure(options: Options) -> tuple[list[Case], list[Chosen]]:
    envs: dict[str, list[str]] = {env: [] for env in options.envs}
    if options.cyborg_path is not None:
        envs["cyborg/CAGE2-v0"] = ["--cyborg-path", str(options.cyborg_path)]
    cases: list[Case] = []
    chosen: list[Chosen] = []
    for repeat in range(options.repeats):
        for env, own in envs.items():
            extra = [*own, *shlex.split(options.flags)]
            found = json.loads(freerun("probe", env, "--json", *extra))
            best = found["recommendation"]
            chosen.append(Chosen(env, best["mode"], best["num_workers"], found["probe_seconds"]))
            for mode in options.modes:
                case = next((case for case in cases if (case.env, case.mode) == (env, mode)), None)
                if case is None:
                    entry = best_of(found, mode)
                    if mode == best["mode"]:
                        entry = best
                    if entry is None:
                        continue
                    case = Case(env, mode, entry["num_workers"], [], [])
                    cases.append(case)
                rate = predicted(found, mode, case.num_workers)
                if rate is None:
                    continue
                case.predicted.append(rate)
                case.measured.append(run(env, case, found["updates"][mode]["steps"], options, extra))
                print(
                    f"[{repeat + 1}/{options.repeats}] {env} {mode} × {case.num_workers}: predicted {rate:,.0f}, "
                    f"measured {case.measured[-1]:,.0f} steps/s",
                    flush=True,
                )
            write(options, cases, chosen)  # what is measured so far is not lost when the rest is cut short
    return cases, chosen


def table(cases: list[Case], chosen: list[Chosen], options: Options) -> str:
    errors = [abs(case.error) for case in cases]
    seconds = [choice.probe_seconds for choice in chosen]
    lines = [
        f"Steps/s that `freerun probe` predicts and that `freerun train` reaches, {os.cpu_count()} cores, PPO"
        f"{f' ({options.flags})' if options.flags else ''}; medians of {max(len(case.measured) for case in cases)} "
        f"interleaved runs of about {options.seconds:g} s. A probe took {statistics.median(seconds):.0f} s.",
        "",
        "| environment | mode | workers | predicted | measured (lowest–highest) | error |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        found = statistics.median(case.measured)
        spread = f"{min(case.measured):,.0f}–{max(case.measured):,.0f}"
        lines.append(
            f"| {case.env} | `{case.mode}` | {case.num_workers} | {statistics.median(case.predicted):,.0f} "
            f"| {found:,.0f} ({spread}) | {100 * case.error:+.0f} % |"
        )
    lines += ["", f"Median error: {100 * statistics.median(errors):.1f} % (wanted: under 15 %).", ""]
    lines += [
        "| environment | `auto` picks | reaches | best that it may pick | best of all | within 5 % |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for env in dict.fromkeys(case.env for case in cases):
        lines.append(verdict(env, cases, chosen))
    note = "`auto` leaves `ray` and `continuous` out unless they are asked for: one is for several machines, the other "
    return "\n".join([*lines, "", note + "drops steps."]) + "\n"


def verdict(env: str, cases: list[Case], chosen: list[Chosen]) -> str:
    """How the mode picked most often compares with the best one measured."""
    reached = {case.mode: statistics.median(case.measured) for case in cases if case.env == env}
    picks = [choice.mode for choice in chosen if choice.env == env]
    pick = max(set(picks), key=picks.count)
    best = max((mode for mode in reached if mode not in NEVER_CHOSEN), key=reached.__getitem__)
    best_of_all = max(reached, key=reached.__getitem__)
    if pick not in reached:
        return f"| {env} | `{pick}` | not measured | `{best}` {reached[best]:,.0f} | – | – |"
    good = "yes" if reached[pick] >= 0.95 * reached[best] else "no"
    return (
        f"| {env} | `{pick}` ({picks.count(pick)} of {len(picks)}) | {reached[pick]:,.0f} "
        f"| `{best}` {reached[best]:,.0f} | `{best_of_all}` {reached[best_of_all]:,.0f} | {good} |"
    )


def write(options: Options, cases: list[Case], chosen: list[Chosen]) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
        "flags": options.flags,
        "cases": [asdict(case) for case in cases],
        "chosen": [asdict(choice) for choice in chosen],
    }
    (options.output / "probe_accuracy.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.output / "probe_accuracy.md").write_text(table(cases, chosen, options))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    cases, chosen = measure(options)
    print(table(cases, chosen, options))


if __name__ == "__main__":
    main()
