"""How many steps a second freerun and other systems reach on the same work, on the same machine.

All collect with a policy acting and do not train, except `freerun_training`: it is the whole command `freerun train`
with all its outputs. `bare` only steps environments, with actions drawn on the way, `bare_ready_actions` with actions
drawn before: the limits of the machine. Some systems can choose how many steps they collect before they hand them over;
each gets the size that was fastest in a trial, which is not among its results. Every figure is from a process of its
own; each repetition runs every system once, so that a change of the machine's speed touches all alike. `--install`
builds the virtual environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tyro
from run_file import ResultFile, write_report

sys.path.insert(0, str(Path(__file__).parent / "peer_runners"))
from measuring import CANNOT_RUN
from workloads import WORKLOADS

REPOSITORY = Path(__file__).parents[1]
RUNNERS = Path(__file__).parent / "peer_runners"
VIRTUAL_ENVS = REPOSITORY / "build" / "peers"
RESULTS = "peers.json"
STARTUP_SECONDS = 180.0
TORCH = "torch==2.13.0"
MUJOCO = ("mujoco==3.17.0", "imageio")
RUN_MARK = "FREERUN_PEERS_RUN"


@dataclass(frozen=True)
class System:
    runner: str
    distribution: str
    """The package whose version is reported."""
    requirements: tuple[str, ...] | None = None
    """For a virtual environment of its own; None for freerun's."""
    without_dependencies: tuple[str, ...] = ()
    """Packages whose own requirements would not go together with the rest."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    arguments: tuple[str, ...] = ()
    """Further arguments of the runner."""
    has_hand_over: bool = False
    """Whether it can be told how many steps it collects before it hands them over."""
    build_settings: tuple[tuple[str, str], ...] = ()
    """Variables of the environment while it is installed."""


SHORT_STEPS = ("halfcheetah", "cartpole")
SYSTEMS = {
    "bare": System("bare.py", "gymnasium"),
    "bare_ready_actions": System("bare.py", "gymnasium", arguments=("--ready-actions",)),
    "freerun_training": System("freerun_training.py", "freerun"),
    "freerun": System("freerun_collecting.py", "freerun"),
    "classic_executor": System("classic_executor.py", "torch"),
    "gymnasium_async": System("gymnasium_async.py", "gymnasium"),
    "gymnasium_sync": System("gymnasium_sync.py", "gymnasium", workloads=SHORT_STEPS),
    "sb3_subproc": System("sb3_subproc.py", "stable-baselines3", has_hand_over=True),
    "sb3_dummy": System("sb3_dummy.py", "stable-baselines3", workloads=SHORT_STEPS, has_hand_over=True),
    "envpool": System("envpool_async.py", "envpool", ("envpool==1.2.5", "gymnasium==1.4.0"), workloads=SHORT_STEPS),
    "tianshou": System(
        "tianshou_collector.py", "tianshou", ("tianshou==2.0.1", "gymnasium==1.4.0", *MUJOCO), has_hand_over=True
    ),
    "sample_factory": System(
        "sample_factory_sampler.py",
        "sample-factory",
        ("sample-factory==2.1.1", *MUJOCO),
        without_dependencies=("gymnasium==1.4.0",),  # it asks for one before 1.0, which has no HalfCheetah-v5
        has_hand_over=True,
    ),
    "pufferlib": System(
        "pufferlib_vector.py",
        "pufferlib",
        ("pufferlib==3.0.0", *MUJOCO),
        without_dependencies=("gymnasium==1.4.0",),  # it asks for one before 1.0, which has no HalfCheetah-v5
        build_settings=(("NO_TRAIN", "1"),),  # without its trainer, whose kernels would be compiled
    ),
    "torchrl": System(
        "torchrl_collector.py", "torchrl", ("torchrl==0.14.1", "gymnasium==1.4.0", *MUJOCO), has_hand_over=True
    ),
    "rllib": System("rllib_env_runners.py", "ray", ("ray[rllib]==2.60.0", *MUJOCO), has_hand_over=True),
}


@dataclass(frozen=True)
class Options:
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Systems; those that are not installed are left out."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Workloads."""
    repeats: int = 5
    """How often each system is run on each workload."""
    seconds: float = 10.0
    """How long a run measures, after its warm-up."""
    output: Path = Path(__file__).parent / "results" / "peers"
    """Folder for peers.json and peers.md."""
    fresh: bool = False
    """Measure the chosen systems and workloads anew, instead of adding to what was measured with the same sources."""
    install: bool = False
    """Build the chosen systems' virtual environments, and measure nothing."""
    report_only: bool = False
    """Write the table again from peers.json."""

    def __post_init__(self) -> None:
        for chosen, known in ((self.systems, SYSTEMS), (self.workloads, WORKLOADS)):
            if unknown := set(chosen) - set(known):
                raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. Choose among {', '.join(known)}.")


# ---------------------------------------------------------------------------------------------- installing


def interpreter(name: str) -> Path:
    folder = REPOSITORY / ".venv" if SYSTEMS[name].requirements is None else VIRTUAL_ENVS / name
    return folder / "bin" / "python"


def install(name: str) -> None:
    system = SYSTEMS[name]
    if system.requirements is None:
        return
    print(f"Installing {name} …", flush=True)
    python = str(interpreter(name))
    subprocess.run([sys.executable, "-m", "venv", VIRTUAL_ENVS / name], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    # torch first and by itself, as in the Makefile; and again with the rest, so that nothing replaces it.
    subprocess.run([*pip, "-c", REPOSITORY / "constraints.txt", TORCH], check=True)
    subprocess.run([*pip, TORCH, *system.requirements], check=True, env={**os.environ, **dict(system.build_settings)})
    if system.without_dependencies:
        subprocess.run([*pip, "--no-deps", *system.without_dependencies], check=True)


def version(name: str) -> str | None:
    """None where the system is not installed, or its runner is missing."""
    python, system = interpreter(name), SYSTEMS[name]
    if not python.exists() or not (RUNNERS / system.runner).exists():
        return None
    code = f"import importlib.metadata as metadata; print(metadata.version({system.distribution!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{system.distribution} {done.stdout.strip()}" if done.returncode == 0 else None


# ---------------------------------------------------------------------------------------------- measuring


@dataclass
class Case:
    """A system on a workload: one line of the table."""

    system: str
    workload: str
    version: str
    hand_over: int | None = None
    """Steps of each environment that it collects before it hands them over; None where that cannot be chosen."""
    samples: list[dict[str, float]] = field(default_factory=list)


def run_all(options: Options) -> None:
    versions = {name: version(name) for name in options.systems}
    for name, found in versions.items():
        if found is None:
            print(f"{name} is left out: {SYSTEMS[name].runner} or {SYSTEMS[name].distribution} is missing.", flush=True)
    file = open_results(options.output)
    cases = {(case["system"], case["workload"]): Case(**case) for case in file.content["cases"]}
    stays = {pair for pair in cases if not options.fresh and file.is_current(row_name(*pair))}
    for repeat in range(options.repeats):
        for workload, name in chosen(options):
            found = versions[name]
            if found is None:
                continue
            case = cases.get((name, workload))
            # Figures of another version, of ours or of theirs, are not to be mixed.
            if case is None or case.version != found or (name, workload) not in stays:
                case = Case(name, workload, found, best_hand_over(name, workload, options.seconds))
            figures = run_once(name, workload, options.seconds, case.hand_over)
            if figures is None:
                continue
            cases[name, workload] = case
            stays.add((name, workload))
            case.samples.append(figures)
            print(f"[{repeat + 1}/{options.repeats}] {workload} {name}: {figures}", flush=True)
            file.content = in_order(cases)
            file.save(row_name(name, workload))  # what is measured so far is not lost when the rest is cut short


def chosen(options: Options) -> Iterator[tuple[str, str]]:
    for workload in options.workloads:
        for name in options.systems:
            if workload in SYSTEMS[name].workloads:
                yield workload, name


def best_hand_over(name: str, workload: str, seconds: float) -> int | None:
    """Return the size that was fastest in one run each."""
    if not SYSTEMS[name].has_hand_over:
        return None
    speeds = {
        size: figures["steps_per_second"]
        for size in WORKLOADS[workload].hand_overs
        if (figures := run_once(name, workload, seconds, size)) is not None
    }
    print(f"{workload} {name}, steps/s by steps that are handed over at once: {speeds}", flush=True)
    return max(speeds, key=speeds.__getitem__, default=None)


def run_once(name: str, workload: str, seconds: float, hand_over: int | None = None) -> dict[str, float] | None:
    """Run a system's runner and end what it leaves behind; None where it failed, which is told."""
    system, mark, timeout = SYSTEMS[name], uuid.uuid4().hex, STARTUP_SECONDS + 3 * seconds
    command = [str(interpreter(name)), str(RUNNERS / system.runner), *system.arguments]
    command += [] if hand_over is None else ["--hand-over", str(hand_over)]
    # Files, because a process that is left behind would keep the end of a pipe open. The folder is for what a system
    # leaves where it is started (PufferLib its pictures).
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryDirectory() as folder,
    ):
        process = subprocess.Popen(
            [*command, "--workload", workload, "--seconds", str(seconds)],
            stdout=output,
            stderr=errors,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, RUN_MARK: mark},
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"{name} on {workload} was ended after {timeout:g} s.", flush=True)
            return None
        finally:
            end_leftovers(process.pid, mark)
            process.wait()
        output.seek(0)
        errors.seek(0)
        if code == CANNOT_RUN:
            print(f"{name} on {workload} is left out: {errors.read().strip().splitlines()[-1]}", flush=True)
            return None
        if code != 0:
            print(f"{name} on {workload} failed:\n{errors.read()[-2000:]}", flush=True)
            return None
        figures: dict[str, float] = json.loads(output.read().splitlines()[-1])
        return figures


def end_leftovers(group: int, mark: str) -> None:
    """The runner's process group, and what left it (Ray's daemons do), known by a variable that it inherited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == mark:
                process.kill()


def row_name(system: str, workload: str) -> str:
    return f"{system}, {workload}"


def open_results(folder: Path) -> ResultFile:
    def rows(content: Any) -> list[str]:
        return [row_name(case["system"], case["workload"]) for case in content["cases"]]

    return ResultFile(folder / RESULTS, {"cases": []}, rows)


def in_order(cases: dict[tuple[str, str], Case]) -> dict[str, Any]:
    order = {pair: place for place, pair in enumerate((name, work) for work in WORKLOADS for name in SYSTEMS)}
    places = sorted(cases, key=lambda pair: order.get(pair, len(order)))
    return {"machine": {"cores": os.cpu_count()}, "cases": [vars(cases[pair]) for pair in places]}


# ---------------------------------------------------------------------------------------------- reporting


def table(report: dict[str, Any]) -> str:
    runs = [len(case["samples"]) for case in report["cases"]]
    # Results from before there were stamps have one date for all.
    about = [f"{report['machine']['cores']} cores", *([report["date"]] if "date" in report else [])]
    lines = [
        f"{', '.join(about)}; median (lowest–highest) of {min(runs)}–{max(runs)} "
        "interleaved runs, each in a process of its own.",
        "",
        "All collect with a policy acting, except `bare` (random actions, drawn on the way) and `bare_ready_actions` "
        "(drawn before); only `freerun_training` trains at the same time (PPO, 10,000 steps an update, 4 epochs): it "
        "is the whole command with all its outputs. *Hand-over* is how many steps of each environment are collected "
        "before the learner gets them, where that can be chosen: the faster of two sizes in a trial.",
    ]
    for name, workload in WORKLOADS.items():
        cases = [case for case in report["cases"] if case["workload"] == name]
        if not cases:
            continue
        bare = [median(case, "steps_per_second") for case in cases if case["system"] == "bare"]
        lines += [
            "",
            f"## {name}: {workload.env_id}, {workload.num_workers} workers × {workload.envs_per_worker} environments",
            "",
            "| system | version | hand-over | runs | steps/s | episodes/s | of `bare` | start-up s |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [row(case, bare[0] if bare else None) for case in cases]
    return "\n".join(lines) + "\n"


def summary(report: dict[str, Any]) -> str:
    """A line per system, the fastest on the first workload on top: the table in the README."""
    found = {(case["system"], case["workload"]): median(case, "steps_per_second") for case in report["cases"]}
    workloads = [name for name in WORKLOADS if ("bare", name) in found]
    systems = dict.fromkeys(case["system"] for case in report["cases"])

    def cell(system: str, workload: str) -> str:
        steps = found.get((system, workload))
        return "–" if steps is None else f"{steps:,.0f} ({100 * steps / found['bare', workload]:.0f} %)"

    lines = [
        f"| steps/s (of `bare`) | {' | '.join(workloads)} |",
        f"| --- |{' ---: |' * len(workloads)}",
    ]
    fastest_first = sorted(systems, key=lambda system: -found.get((system, workloads[0]), 0.0))
    lines += [f"| `{system}` | {' | '.join(cell(system, name) for name in workloads)} |" for system in fastest_first]
    return "\n".join(lines)


def summary_of(folder: Path) -> str:
    """The table in the README."""
    return summary(open_results(folder).content)


def row(case: dict[str, Any], bare: float | None) -> str:
    share = f"{100 * median(case, 'steps_per_second') / bare:.0f} %" if bare else "–"
    return (
        f"| `{case['system']}` | {case['version']} | {case['hand_over'] or '–'} | {len(case['samples'])} "
        f"| {spread(case, 'steps_per_second', ',.0f')} "
        f"| {spread(case, 'episodes_per_second', ',.1f')} | {share} | {spread(case, 'startup_seconds', '.1f')} |"
    )


def median(case: dict[str, Any], name: str) -> float:
    return float(statistics.median(sample[name] for sample in case["samples"]))


def spread(case: dict[str, Any], name: str, form: str) -> str:
    values = [sample[name] for sample in case["samples"]]
    beyond = f" ({format(min(values), form)}–{format(max(values), form)})" if len(values) > 1 else ""
    return format(statistics.median(values), form) + beyond


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "peers.md", table(file.content), file.stamped())


def main() -> None:
    # As an exception, so that the running system is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = tyro.cli(Options, description=__doc__)
    if options.install:
        for name in options.systems:
            install(name)
        return
    if not options.report_only:
        run_all(options)
    if not open_results(options.output).content["cases"]:
        raise SystemExit("Nothing has been measured.")
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
