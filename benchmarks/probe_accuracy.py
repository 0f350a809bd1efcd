"""How far `freerun probe` is from what happens: every mode trains for a while with the settings predicted best for it.

Machines that others use too change their speed within seconds, by more than modes differ. So all modes of an
environment train at the same time and take turns: one goes on for a second while the others stand still (SIGSTOP), and
only the seconds in which it went on count. Environments that sleep would sleep on while they stand still; they need no
cores either, so their modes train one after the other, and those predicted best three times. Probes are made before and
after; the table shows medians. Rows of environments that are not asked for stay as they were.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro
from run_file import ResultFile, write_report
from turn_taking import TURN_SECONDS, Training, take_turns

from freerun.tools.probe.auto_mode import ENOUGH_WORKERS

CONTENDS = 0.9
NEVER_CHOSEN = ("ray", "continuous")
"""Modes that `auto` leaves out unless they are asked for."""
SMALL_QUEUE = 16
"""For `continuous`: predictions are for a full queue, and its own of 1,000 batches takes up to minutes to fill."""


@dataclass(frozen=True)
class Options:
    envs: tuple[str, ...] = ("freerun/Straggler-v0", "CartPole-v1", "HalfCheetah-v5", "freerun/NetworkDefence-v0")
    """Environments."""
    cyborg_path: Path | None = None
    """The folder that holds the CybORG package: adds cyborg/CAGE2-v0."""
    modes: tuple[str, ...] = ("sequential", "sync", "pipes", "executor", "freerun", "ray", "continuous", "batch")
    """Modes."""
    repeats: int = 2
    """How often each environment is probed (twice each time) and each mode run."""
    seconds: float = 15.0
    """How long each mode trains, besides its first updates."""
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
    settings: dict[str, int] = field(default_factory=dict)
    """What the probe has chosen for the mode, by the names of the settings."""

    @property
    def reached(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return statistics.median(self.predicted) / self.reached - 1


@dataclass
class Chosen:
    """What a probe recommended for an environment, and the seconds it took."""

    env: str
    mode: str
    num_workers: int
    probe_seconds: float


# ---------------------------------------------------------------------------------------------- a run


def train(cases: Sequence[Case], extra: Sequence[str], seconds: float, in_turns: bool) -> None:
    """Each of them for so many seconds."""
    if not in_turns:
        most = max(case.predicted[-1] for case in cases)
        contenders = [case for case in cases if case.predicted[-1] > CONTENDS * most]
        for case in (*cases, *contenders, *contenders):
            with Training(flags_of(case, extra)) as training:
                training.warm_up()
                while not training.is_done(seconds):
                    training.go_on(TURN_SECONDS)
            case.measured.append(training.rate)
        return
    with contextlib.ExitStack() as stack:
        trainings = [stack.enter_context(Training(flags_of(case, extra))) for case in cases]
        take_turns(trainings, seconds)
    for case, training in zip(cases, trainings, strict=True):
        case.measured.append(training.rate)


def flags_of(case: Case, extra: Sequence[str]) -> list[str]:
    settings = {**case.settings, **({"max_queue_size": SMALL_QUEUE} if case.mode == "continuous" else {})}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [case.env, "--mode", case.mode, *flags, *extra]


# ---------------------------------------------------------------------------------------------- an environment


def probe(env: str, extra: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "freerun", "probe", env, "--json", *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the probe of {env} failed:\n{done.stderr}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def cases_of(env: str, found: dict[str, Any], modes: Sequence[str]) -> list[Case]:
    """Every mode with the settings that `auto` would choose for it: the fewest environments that are enough."""
    cases = []
    for mode in modes:
        able = [entry for entry in found["predictions"] if entry["mode"] == mode and entry["steps_per_second"]]
        if able:
            most = max(float(entry["steps_per_second"]) for entry in able)
            enough = [entry for entry in able if entry["steps_per_second"] >= (1 - ENOUGH_WORKERS) * most]
            chosen = min(enough, key=lambda entry: (entry["num_envs"], entry["num_workers"]))
            cases.append(Case(env, mode, chosen["num_workers"], [], [], chosen["settings"]))
    return cases


def note(found: dict[str, Any], cases: Sequence[Case], chosen: list[Chosen], env: str) -> None:
    best = found["recommendation"]
    chosen.append(Chosen(env, best["mode"], best["num_workers"], found["probe_seconds"]))
    # A later probe may prefer other settings for a mode and a number of workers; those that were run are compared.
    rates = {(entry["mode"], str(entry["settings"])): entry["steps_per_second"] for entry in found["candidates"]}
    for case in cases:
        case.predicted.append(rates[case.mode, str(case.settings)])


def kept(folder: Path, envs: Mapping[str, Any]) -> tuple[dict[str, list[Case]], list[Chosen]]:
    """What was measured before, of other environments."""
    found = open_results(folder).content
    cases: dict[str, list[Case]] = {}
    for fields in found["cases"]:
        if fields["env"] not in envs:
            cases.setdefault(fields["env"], []).append(Case(**fields))
    return cases, [Chosen(**fields) for fields in found["chosen"] if fields["env"] not in envs]


def measure(options: Options) -> tuple[list[Case], list[Chosen]]:
    envs: dict[str, list[str]] = {env: [] for env in options.envs}
    if options.cyborg_path is not None:
        envs["cyborg/CAGE2-v0"] = ["--cyborg-path", str(options.cyborg_path)]
    cases, chosen = kept(options.output, envs)
    for repeat in range(options.repeats):
        for env, own in envs.items():
            extra = [*own, *shlex.split(options.flags)]
            found = probe(env, extra)
            mine = cases.setdefault(env, cases_of(env, found, options.modes))
            note(found, mine, chosen, env)
            train(mine, extra, options.seconds, in_turns=found["environment"]["cpu_share"] > 0.5)
            note(probe(env, extra), mine, chosen, env)
            for case in mine:
                print(
                    f"[{repeat + 1}/{options.repeats}] {env} {case.mode} × {case.num_workers}: predicted "
                    f"{case.predicted[-2]:,.0f} and {case.predicted[-1]:,.0f}, measured {case.measured[-1]:,.0f}",
                    flush=True,
                )
            write(options, [case for some in cases.values() for case in some], chosen)  # not lost if it is cut short
    return [case for some in cases.values() for case in some], chosen


# ---------------------------------------------------------------------------------------------- the table


def table(report: dict[str, Any], cases: list[Case], chosen: list[Chosen]) -> str:
    flags = report["flags"]
    errors = [abs(case.error) for case in cases]
    seconds = [choice.probe_seconds for choice in chosen]
    lines = [
        "# What a probe predicts and what happens",
        "",
        f"Steps/s that `freerun probe` predicts and that `freerun train` reaches, {report['machine']['cores']} cores, "
        f"PPO{f' ({flags})' if flags else ''}; medians of runs of about {report['seconds']:g} s, in which "
        f"the modes of an environment that computes take turns every {TURN_SECONDS:g} s, and of probes before and "
        f"after. A probe took {statistics.median(seconds):.0f} s.",
        "",
        "| environment | mode | settings | probes | predicted (lowest–highest) | runs | measured (same) | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {case.env} | `{case.mode}` | {chosen_words(case)} | {len(case.predicted)} | {spread(case.predicted)} "
        f"| {len(case.measured)} | {spread(case.measured)} | {100 * case.error:+.0f} % |"
        for case in cases
    ]
    lines += ["", f"Median error: {100 * statistics.median(errors):.1f} % (wanted: under 15 %).", ""]
    lines += [
        "| environment | `auto` picks | which reaches | best that it may pick | share | best of all | within 5 % |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [verdict(env, cases, chosen) for env in dict.fromkeys(case.env for case in cases)]
    left_out = "`auto` leaves `ray` and `continuous` out unless they are asked for: one is for several machines, the "
    return "\n".join([*lines, "", left_out + "other drops steps."]) + "\n"


def chosen_words(case: Case) -> str:
    """The settings of a case; of results from before there were any, the number of workers."""
    settings = case.settings or {"num_workers": case.num_workers}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


def verdict(env: str, cases: list[Case], chosen: list[Chosen]) -> str:
    """How what was picked compares with the best mode measured, run by run; the worst where probes disagree."""
    mine = {case.mode: case for case in cases if case.env == env}
    picks = Counter(choice.mode for choice in chosen if choice.env == env)
    best = max((case for case in mine.values() if case.mode not in NEVER_CHOSEN), key=lambda case: case.reached)
    best_of_all = max(mine.values(), key=lambda case: case.reached)
    shares = {
        mode: statistics.median(a / b for a, b in zip(mine[mode].measured, best.measured, strict=True))
        for mode in picks
    }
    worst = min(shares, key=shares.__getitem__)
    named = ", ".join(f"`{mode}` ({count} of {picks.total()})" for mode, count in picks.most_common())
    within = "yes" if shares[worst] >= 0.95 else "no"
    return (
        f"| {env} | {named} | {mine[worst].reached:,.0f} | `{best.mode}` {best.reached:,.0f} "
        f"| {100 * shares[worst]:.0f} % | `{best_of_all.mode}` {best_of_all.reached:,.0f} | {within} |"
    )


def write(options: Options, cases: list[Case], chosen: list[Chosen]) -> None:
    file = open_results(options.output)
    file.content = {
        "machine": {"cores": os.cpu_count()},
        "flags": options.flags,
        "seconds": options.seconds,
        "cases": [asdict(case) for case in cases],
        "chosen": [asdict(choice) for choice in chosen],
    }
    measured = {*options.envs, *(["cyborg/CAGE2-v0"] if options.cyborg_path else [])}
    file.save(*(row_name(vars(case)) for case in cases if case.env in measured))


def row_name(case: dict[str, Any]) -> str:
    return f"{case['env']}, {case['mode']}, {case['num_workers']} workers"


def open_results(folder: Path) -> ResultFile:
    empty: dict[str, Any] = {"cases": [], "chosen": []}
    return ResultFile(folder / "probe_accuracy.json", empty, lambda report: map(row_name, report["cases"]))


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    cases, chosen = kept(folder, {})
    text = table(file.content, [case for found in cases.values() for case in found], chosen)
    return write_report(folder / "probe_accuracy.md", text, file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that nobody is left standing still
    cases, chosen = measure(options)
    write(options, cases, chosen)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
