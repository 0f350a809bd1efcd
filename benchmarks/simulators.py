"""How fast do real simulators train: freerun beside Stable-Baselines3's SubprocVecEnv, and beside the simulator alone?

Each case is a preset. `freerun` is the whole command with all its outputs. `sb3` is Stable-Baselines3's PPO with as
many environments, each in a process of its own, and with the same steps per update, minibatches and epochs. Both train
for the same number of steps, and their speed is that of the whole training: what freerun collects before its first
update, and learns after the last step, counts against it, and so does the start of its workers. `bare` is the limit:
as many processes as there are workers, which only step, with random actions that the masks allow. The three take turns,
and a ratio compares them within one repetition. Every finished run is kept in simulators.json, so an interrupted
benchmark continues; `--again` replaces the runs that it names, and no others.

make test-simulators    # makes the environment with the simulators
build/simulators/bin/python benchmarks/simulators.py --cases sumo --repetitions 0 1 2
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import gymnasium
import numpy as np
import tyro
from run_file import RunFile, write_report

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.settings.presets import PRESETS
from freerun.tools.bench.load_meter import LoadMeter

BARE_SECONDS = 4.0
MAX_OTHERS_PERCENT = 20.0
"""A run beside others that used more is left out of the tables, and measured again when the benchmark continues."""
SLOWEST_SECONDS = 150.0
"""A measurement that takes longer has failed."""
SYSTEMS = ("bare", "freerun", "sb3")
SIMULATOR_PACKAGES = ("eclipse-sumo", "sumo-rl", "grid2op", "lightsim2grid", "pandapower", "ale-py")


@dataclass(frozen=True)
class Case:
    """A preset, with what both systems get besides."""

    preset: str
    about: str
    total_steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    """They override those of the preset."""
    env_args: dict[str, Any] = field(default_factory=dict)
    is_bare_only: bool = False

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, PRESETS[self.preset].settings.get(name, default))


CASES = {
    "sumo": Case("sumo-intersection", "SUMO, one crossing", 32_768),
    "lightsim": Case("grid2op-case14", "grid2op, lightsim2grid", 32_768),
    # A step takes so long that an update has only a few.
    "pandapower": Case(
        "grid2op-case14",
        "grid2op, pandapower",
        768,
        {"steps_per_update": 48, "segment_steps": 6},
        {"backend": "pandapower"},
    ),
    "atari": Case("atari-breakout", "Atari, Breakout", 16_384),
    "uncached": Case(
        "grid2op-case14", "grid2op, lightsim2grid, `cache_series False`", 0, {}, {"cache_series": False}, True
    ),
}


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = tuple(CASES)
    """What is measured; results of the others stay."""
    num_workers: tuple[int, ...] = (2, 8)
    repetitions: tuple[int, ...] = (0, 1, 2)
    """The numbers of the repetitions to measure now."""
    again: bool = False
    """Measure runs again that are there already."""
    output: Path = Path(__file__).parent / "results" / "simulators"
    """Folder for simulators.json and .md."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class SimulatorRun:
    case: str
    num_workers: int
    system: str
    repetition: int
    steps_per_second: float
    step_ms: float
    """The mean of a step and of a reset in one process of `bare`, while the others run; 0 for other systems."""
    reset_ms: float
    others_percent: float
    """The share of all cores that other programs used during this run."""
    date: str
    total_steps: int
    """Of a training; 0 for `bare`."""


Speed = tuple[float, float, float]
"""Steps per second, milliseconds of a step, milliseconds of a reset."""


def make_env(case: Case) -> gymnasium.Env[Any, Any]:
    settings = PRESETS[case.preset].settings
    return GymnasiumFactory(settings["env"], case.env_args, wrap=settings.get("wrap")).make_one().env


def step_alone(case: Case, seed: int, together: Any, speeds: Any) -> None:
    """Step an environment for a while with random actions that it allows, once all processes are ready."""
    env = make_env(case)
    masks: Callable[[], Any] | None = (
        env.get_wrapper_attr("action_masks") if env.has_wrapper_attr("action_masks") else None
    )
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    rng, num_actions = np.random.default_rng(seed), int(env.action_space.n)
    env.reset(seed=seed)
    together.wait()
    began, num_steps, num_resets, reset_seconds = time.perf_counter(), 0, 0, 0.0
    while (seconds := time.perf_counter() - began) < BARE_SECONDS:
        action = rng.integers(num_actions) if masks is None else rng.choice(np.flatnonzero(masks()))
        _, _, terminated, truncated, _ = env.step(np.int64(action))
        num_steps += 1
        if terminated or truncated:
            ended = time.perf_counter()
            env.reset()
            reset_seconds += time.perf_counter() - ended
            num_resets += 1
    speeds.put((num_steps / seconds, 1e3 * (seconds - reset_seconds) / num_steps, 1e3 * reset_seconds, num_resets))
    env.close()


def answers(queue: Any, processes: Sequence[Any]) -> list[Any]:
    """Return what each process puts into the queue. If one fails, all are ended and this raises."""
    found: list[Any] = []
    deadline = time.monotonic() + SLOWEST_SECONDS
    try:
        while len(found) < len(processes):
            with contextlib.suppress(Empty):
                found.append(queue.get(timeout=0.5))
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                raise RuntimeError("a process failed, or did not end")
        return found
    finally:
        for process in processes:
            if len(found) < len(processes):
                process.kill()
            process.join()


def bare(case: Case, num_workers: int, repetition: int) -> Speed:
    context = multiprocessing.get_context("spawn")  # as for freerun, every process has a simulator of its own
    together, speeds = context.Barrier(num_workers), context.Queue()
    seeds = range(100 * repetition, 100 * repetition + num_workers)
    workers = [context.Process(target=step_alone, args=(case, seed, together, speeds)) for seed in seeds]
    for worker in workers:
        worker.start()
    found = answers(speeds, workers)
    num_resets = sum(one[3] for one in found)
    reset_ms = sum(one[2] for one in found) / num_resets if num_resets else 0.0
    return sum(one[0] for one in found), statistics.mean(one[1] for one in found), reset_ms


def train_freerun(case: Case, num_workers: int, repetition: int) -> Speed:
    settings = {**case.settings, "num_workers": num_workers, "total_steps": case.total_steps, "seed": repetition}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = [word for name, value in case.env_args.items() for word in (name, str(value))]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "freerun", "train", "--preset", case.preset, *flags]
        command += [*(["--env-args", *arguments] if arguments else []), "--run-dir", str(run_dir)]
        subprocess.run(command, check=True, capture_output=True, timeout=SLOWEST_SECONDS)
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return last["step"] / last["wall_seconds"], 0.0, 0.0


def learn_by_sb3(case: Case, num_workers: int, repetition: int, speeds: Any) -> None:
    """Train with Stable-Baselines3 and hand over its steps per second."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([lambda: make_env(case) for _ in range(num_workers)])
    model = PPO(
        "CnnPolicy" if PRESETS[case.preset].settings.get("wrap") == "atari" else "MlpPolicy",
        envs,
        n_steps=case.setting("steps_per_update", 2048) // num_workers,
        batch_size=case.setting("minibatch_size", 256),
        n_epochs=case.setting("num_epochs", 10),
        learning_rate=case.setting("learning_rate", 6e-4),
        clip_range=case.setting("clip_range", 0.2),
        ent_coef=case.setting("entropy_coef", 0.0),
        seed=repetition,
        device="cpu",
    )
    began = time.perf_counter()
    model.learn(case.total_steps)
    speeds.put(model.num_timesteps / (time.perf_counter() - began))
    envs.close()


def train_sb3(case: Case, num_workers: int, repetition: int) -> Speed:
    context = multiprocessing.get_context("spawn")
    speeds = context.Queue()
    learner = context.Process(target=learn_by_sb3, args=(case, num_workers, repetition, speeds))
    learner.start()
    return answers(speeds, [learner])[0], 0.0, 0.0


MEASURES: dict[str, Callable[[Case, int, int], Speed]] = {"bare": bare, "freerun": train_freerun, "sb3": train_sb3}


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the lowest and the highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def report(all_records: Sequence[SimulatorRun]) -> str:
    # Trainings of another length are not comparable, because of what is collected ahead.
    records = [
        one
        for one in all_records
        if one.others_percent <= MAX_OTHERS_PERCENT and one.total_steps in (0, CASES[one.case].total_steps)
    ]
    lines = [
        "# Real simulators",
        "",
        "Steps per second of whole trainings with PPO: median (lowest – highest). `bare` are as many processes that "
        "only step, with random actions. `sb3` is Stable-Baselines3's PPO on its SubprocVecEnv. Both trainings have "
        "the preset's steps per update, minibatches and epochs; freerun's policies keep to masks, which SB3's PPO does "
        "not have. Ratios compare runs within one repetition. `others` is the share of all cores that other programs "
        f"used meanwhile; runs beside more than {MAX_OTHERS_PERCENT:.0f} % are left out. "
        "`benchmarks/simulators.py` wrote this.",
        "",
        "A training has 16 updates. Its speed is that of the whole, so what freerun collects before its first update "
        "and learns after its last step counts against it, and so does the start of its workers, which SB3's seconds "
        "leave out.",
        "",
        "| simulator | workers | `bare` | freerun | sb3 | freerun / `bare` | freerun / sb3 | repetitions | others |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    costs = [
        "",
        "| simulator | processes | a step | a reset | a reset in steps |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, case in CASES.items():
        for num_workers in sorted({one.num_workers for one in records if one.case == name}):
            here = [one for one in records if (one.case, one.num_workers) == (name, num_workers)]
            speeds = {system: {one.repetition: one for one in here if one.system == system} for system in SYSTEMS}
            alone = list(speeds["bare"].values())
            if alone:
                step, reset = (statistics.median(one.step_ms for one in alone), [one.reset_ms for one in alone])
                known = [each for each in reset if each]
                in_steps = (
                    f"{statistics.median(known):.1f} ms | {statistics.median(known) / step:.1f}" if known else "– | –"
                )
                costs.append(f"| {case.about} | {num_workers} | {step:.2f} ms | {in_steps} |")
            whole = sorted(set.intersection(*(set(found) for found in speeds.values())))
            if not whole and not case.is_bare_only:
                lines.append(f"| {case.about} | {num_workers} | {'– | ' * 5}0 | – |")
            if whole:
                bare, ours, theirs = ([speeds[system][k].steps_per_second for k in whole] for system in SYSTEMS)
                of_bare = [one / other for one, other in zip(ours, bare, strict=True)]
                of_sb3 = [one / other for one, other in zip(ours, theirs, strict=True)]
                beside = [speeds[system][k].others_percent for system in SYSTEMS for k in whole]
                others = f"{statistics.median(beside):.0f} % (up to {max(beside):.0f} %)"
                cells = [spread(values, ",.0f") for values in (bare, ours, theirs)]
                cells += [spread(of_bare, ".0%"), spread(of_sb3, ".2f"), str(len(whole)), others]
                lines.append(f"| {case.about} | {num_workers} | {' | '.join(cells)} |")
    lines += ["", "What steps and resets take, in a process of `bare` (medians of the repetitions):"]
    return "\n".join([*lines, *costs]) + "\n"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "simulators.json", SimulatorRun)
    return write_report(folder / "simulators.md", report(file.records), file.stamped())


def main(options: Options) -> None:
    file = RunFile(options.output / "simulators.json", SimulatorRun)
    finished = [one for one in file.records if not options.again and one.others_percent <= MAX_OTHERS_PERCENT]
    done = {(one.case, one.num_workers, one.system, one.repetition, one.total_steps) for one in finished}
    for repetition in () if options.report_only else options.repetitions:
        for name in options.cases:
            case = CASES[name]
            for num_workers in options.num_workers[:1] if case.is_bare_only else options.num_workers:
                for system in SYSTEMS[:1] if case.is_bare_only else SYSTEMS:
                    total_steps = 0 if system == "bare" else case.total_steps
                    if (name, num_workers, system, repetition, total_steps) in done:
                        continue
                    meter = LoadMeter()
                    speed = MEASURES[system](case, num_workers, repetition)
                    others = meter.read().others
                    today = datetime.now(UTC).date().isoformat()
                    run = SimulatorRun(name, num_workers, system, repetition, *speed, others, today, total_steps)
                    file.replace(run, "case", "num_workers", "system", "repetition")
                    print(
                        f"{name} × {num_workers}, {system}: {speed[0]:,.0f} steps/s, others {others:.0f} %", flush=True
                    )
    print(write_reports(options.output))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
