"""RoughDrone's tasks learned by several algorithms: by steps and by seconds, beside scripted pilots and upper bounds.

A curve is the mean return of the last 100 training episodes, with the noise of exploration. The table also has the
trained policy's own return: the most likely actions in one episode of each of 256 drones with held-out seeds. Every run
is a process of its own. Runs are kept in drone_learning.json by (task, name, seed): a further call adds the missing
ones and drops none, so an interrupted benchmark continues. benchmarks/drone_pilots.py measures the pilots.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from pictures import is_drawn, make_plots, save
from run_file import RunFile, read_content, write_report

import freerun
from freerun_envs.drone_pilots import fly
from freerun_envs.drone_sim import RoughDroneSim

RESULTS = Path(__file__).parent / "results"
TASKS = {"hover": ("hover", 1), "waypoint": ("waypoint", 1), "explore": ("explore", 1), "explore-v0": ("explore", 0)}
"""The task and the version of the environment. `hover` and `waypoint` are the same in both versions."""
MILLION = 1_000_000
TOTAL_STEPS = {
    "ppo": {"hover": 6 * MILLION, "waypoint": 60 * MILLION, "explore": 60 * MILLION, "explore-v0": 60 * MILLION},
    "mbpo": {"hover": 100_000, "waypoint": 3 * MILLION, "explore": 5 * MILLION, "explore-v0": 4 * MILLION},
}
OTHER_STEPS = {"hover": 2 * MILLION, "waypoint": 20 * MILLION, "explore": 30 * MILLION, "explore-v0": 20 * MILLION}
"""Of algorithms that TOTAL_STEPS does not name, such as off-policy ones with thousands of drones."""
FLAGS = {
    "ppo": (
        *("--num-envs", "4096", "--minibatch-size", "24576", "--num-epochs", "5", "--hidden-sizes", "128", "128"),
        *("--learning-rate", "1e-3", "--initial-log-std", "-0.5"),
    ),
    "mbpo": (
        *("--preset", "mbpo-drone", "--hidden-sizes", "256", "256", "--batch-size", "256", "--learning-rate", "3e-4"),
        *("--model-hidden-sizes", "200", "200", "200", "200", "--model-updates-per-step", "1"),
    ),
}
FAR_FLAGS = {
    "ppo": ("--gamma", "0.998"),
    "fastsac": ("--updates-per-vector-step", "4", "--buffer-size", "3000000", "--learning-rate", "3e-4"),
    "mbpo": (
        *("--num-envs", "512", "--gamma", "0.997", "--batch-size", "1024", "--updates-per-step", "0.125"),
        *("--model-updates-per-step", "0.03", "--rollouts-per-step", "20", "--buffer-size", "2000000"),
        *("--termination", "learned", "--learning-rate", "3e-4", "--learning-starts", "1000"),
    ),
}
"""In the tasks of 20 s, `waypoint` and `explore`, where what a drone does counts for longer. Chosen by runs with seeds
from 100 on."""
OTHER_FLAGS = ("--num-envs", "4096")
REACHED = 0.7
"""The share of the best pilot's return at which a task counts as learned: 99 in `hover`."""
LIKE_PPO = 0.9
"""The share of the return of PPO's trained policies after which algorithms are compared by their steps."""
NUM_TRIALS, TRIAL_SEED = 256, 77_000
MAX_POINTS = 300
"""Of a curve."""


@dataclass(frozen=True)
class Options:
    tasks: tuple[str, ...] = ("hover", "waypoint", "explore")
    """What is learned: hover, waypoint, explore (version 1), explore-v0."""
    algorithms: tuple[str, ...] = ("ppo", "mbpo")
    """Who learns: any names that --algo takes."""
    seeds: int = 3
    """Runs of each: seeds 0, 1, …"""
    name: str | None = None
    """The runs' name in the report (the algorithm's if not given), for runs with other --flags or --env-args."""
    flags: str = ""
    """More flags for every run, in one word: --flags="--gamma 0.995 --num-envs 8192"."""
    env_args: str = ""
    """More arguments of the environment, in one word: --env-args="terrain_seed 1"."""
    total_steps: int | None = None
    """Instead of the steps that are listed in this file."""
    trials_every: int | None = None
    """Judge by trials on the way, with the most likely actions, every so many steps. Otherwise by training episodes:
    those that begin with a trained policy end 500 steps of every drone later."""
    device: str = "auto"
    """Of simulator and learner."""
    at_once: int = 1
    """Runs at a time. With more than one the seconds are too many, and the report says so."""
    max_minutes: float | None = None
    """End by then. Runs that have not finished are stopped and left to the next call."""
    again: bool = False
    """Run again what has finished before; a new result takes the place of the old one."""
    output: Path = RESULTS / "drone_learning"
    """Folder for drone_learning.json, .md and .png."""
    report_only: bool = False
    """Write the report again, run nothing."""


@dataclass(frozen=True)
class Run:
    task: str
    name: str
    seed: int
    device: str
    curve: list[tuple[int, float, float]]
    """(step, return, seconds)."""
    at_once: int = 1
    final: dict[str, float] = field(default_factory=dict)
    """The trained policy's mean return, deviation, share of crashes and share of cells seen."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.name, self.seed


def run_one(options: Options, task: str, algorithm: str, seed: int, deadline: float | None) -> Run:
    kind, version = TASKS[task]
    steps = options.total_steps or TOTAL_STEPS.get(algorithm, OTHER_STEPS)[task]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        flags = (
            *(f"freerun/RoughDrone-v{version}", "--env-args", "task", kind, *options.env_args.split()),
            *FLAGS.get(algorithm, OTHER_FLAGS),
            *(() if kind == "hover" else FAR_FLAGS.get(algorithm, ())),
            *("--algo", algorithm, "--mode", "batch", "--quiet"),
            *("--total-steps", str(steps), "--seed", str(seed), "--device", options.device),
            *(*options.flags.split(), "--run-dir", str(run_dir)),
            *(("--eval-every", str(options.trials_every), "--eval-episodes", "32") if options.trials_every else ()),
        )
        left = None if deadline is None else max(1.0, deadline - time.monotonic())
        subprocess.run([sys.executable, "-m", "freerun", "train", *flags], check=True, timeout=left)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        device = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["device"]
        final = trials(run_dir, kind, version, options.env_args.split())
    step, score = ("eval_step", "eval_return") if options.trials_every else ("step", "return_mean")
    points = [(int(r[step]), r[score], r["wall_seconds"]) for r in records if r.get(score) is not None]
    curve = points[:: max(1, len(points) // MAX_POINTS)]
    return Run(task, name_of(options, algorithm), seed, device, [*curve, points[-1]], options.at_once, final)


def name_of(options: Options, algorithm: str) -> str:
    name = options.name or algorithm
    # A run that was judged on the way has another curve, and its own seconds.
    return f"{name} by trials" if options.trials_every else name


def trials(run_dir: Path, task: str, version: int, env_args: list[str]) -> dict[str, float]:
    torch.set_num_threads(1)  # a few hundred drones are too little work for more
    policy = freerun.load_policy(run_dir)
    more: dict[str, Any] = {
        key: json.loads(value.lower()) for key, value in zip(env_args[::2], env_args[1::2], strict=True)
    }
    sim = RoughDroneSim(NUM_TRIALS, task=task, seed=TRIAL_SEED, autoreset=False, version=version, **more)
    flights = fly(sim, lambda sim: torch.from_numpy(policy.predict(sim.observe().numpy())))
    returns = flights.returns
    return {
        "mean": float(returns.mean()),
        "deviation": float(returns.std()),
        "crashed": float(flights.crashed.float().mean()),
        "seen": float(flights.seen_share.mean()),
    }


# ---------------------------------------------------------------------------------------------- the report


def pilots_of(task: str) -> tuple[float, str, float]:
    """The upper bound, and the best pilot's name and mean return."""
    tables = read_content(RESULTS / "drone_pilots" / "drone_pilots.json")
    table = next(table for table in tables if (table["task"], table["version"]) == TASKS[task])
    best = max(table["pilots"], key=lambda pilot: pilot["mean"])
    return table["most"], best["pilot"], best["mean"]


def when_learned(run: Run, score: float) -> tuple[int, float] | None:
    """Steps and seconds."""
    return next(((step, seconds) for step, found, seconds in run.curve if found >= score), None)


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"


def markdown(runs: list[Run]) -> str:
    lines = [
        "# RoughDrone learned",
        "",
        f"After how many real steps and seconds the return is {REACHED:.0%} of the best scripted pilot's: that of the "
        "last 100 training episodes or, in rows *by trials*, of trials with the most likely actions on the way "
        "(whose time counts). *Trained* is the policy at the end, with the most likely actions in "
        f"{NUM_TRIALS} episodes. *Like PPO* is after how many steps the return is {LIKE_PPO:.0%} of what PPO's trained "
        "policies return. Medians (lowest – highest) over seeds. `benchmarks/drone_learning.py` wrote this; "
        "[the pilots](../drone_pilots/drone_pilots.md) are those of `benchmarks/drone_pilots.py`.",
    ]
    for task in [task for task in TASKS if any(run.task == task for run in runs)]:
        most, pilot, best = pilots_of(task)
        lines += [
            "",
            f"## {task}",
            "",
            f"The best pilot ({pilot}) returns {best:.1f}, and no policy can return more than {most:.0f}. Learned: "
            f"{REACHED * best:.0f}.",
            "",
            "| | device | seeds | learned | real steps | seconds | like PPO: real steps | return at the end | trained "
            "| crashed | seen |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        of_ppo = [run.final["mean"] for run in runs if run.task == task and run.name.split()[0] == "ppo" and run.final]
        for name in sorted({run.name for run in runs if run.task == task}):
            mine = [run for run in runs if (run.task, run.name) == (task, name)]
            found = [moment for run in mine if (moment := when_learned(run, REACHED * best)) is not None]
            marks = ", several at once" if any(run.at_once > 1 for run in mine) else ""
            cells = [name + marks, mine[0].device, str(len(mine)), str(len(found))]
            cells += [spread([float(moment[part]) for moment in found], part) for part in (0, 1)]
            like_ppo = LIKE_PPO * median(of_ppo) if of_ppo else float("inf")
            reached = [moment[0] for run in mine if (moment := when_learned(run, like_ppo)) is not None]
            less = f", {len(reached)} of {len(mine)}" if 0 < len(reached) < len(mine) else ""
            cells.append(spread([float(step) for step in reached], 0) + less)
            cells.append(f"{median(run.curve[-1][1] for run in mine):.1f}")
            trained = [run.final for run in mine if run.final]
            cells.append(spread([final["mean"] for final in trained], 1))
            cells += [
                f"{median(final[key] for final in trained):.0%}" if trained else "–" for key in ("crashed", "seen")
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %") + "\n"


def draw(runs: list[Run], path: Path) -> None:
    tasks = [task for task in TASKS if any(run.task == task for run in runs)]
    names = sorted({run.name for run in runs})
    figure, plots = make_plots(2 * len(tasks))
    for number, plot in enumerate(plots):
        task, is_by_steps = tasks[number % len(tasks)], number < len(tasks)
        for run in (run for run in runs if run.task == task):
            steps, scores, seconds = zip(*run.curve, strict=True)
            plot.plot(steps if is_by_steps else seconds, scores, color=f"C{names.index(run.name)}", alpha=0.7)
        most, pilot, best = pilots_of(task)
        plot.axhline(most, color="black", linewidth=0.8, linestyle=":")
        plot.axhline(best, color="grey", linewidth=0.8, linestyle="--")
        plot.annotate(pilot, (0.02, best), xycoords=("axes fraction", "data"), fontsize="x-small", va="top")
        plot.annotate("the most", (0.02, most), xycoords=("axes fraction", "data"), fontsize="x-small", va="bottom")
        plot.set(title=task, xlabel="real steps" if is_by_steps else "seconds", ylabel="return")
        plot.set_xscale("log")
    # One entry for each name, whichever tasks it has learned.
    legend = [plots[0].plot([], [], color=f"C{place}", label=name)[0] for place, name in enumerate(names)]
    save(figure, path, legend)


def write_reports(folder: Path) -> str:
    file, picture = RunFile(folder / "drone_learning.json", Run), folder / "drone_learning.png"
    runs = sorted(file.records, key=lambda run: run.key)
    if not is_drawn(picture):
        draw(runs, picture)
    return write_report(folder / "drone_learning.md", markdown(runs), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = RunFile(options.output / "drone_learning.json", Run)
    found = {run.key for run in file.records} if not options.again else set()
    wanted = [
        (task, algorithm, seed)
        for seed in range(0 if options.report_only else options.seeds)
        for task in options.tasks
        for algorithm in options.algorithms
        if (task, name_of(options, algorithm), seed) not in found
    ]
    deadline = None if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
    with ThreadPoolExecutor(options.at_once) as pool:
        futures = {pool.submit(run_one, options, *case, deadline): case for case in wanted}
        for done in as_completed(futures):
            try:
                run = done.result()
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(*futures[done], f"has no result: {type(error).__name__}", flush=True)
                continue
            file.records = [*(other for other in file.records if other.key != run.key), run]
            file.save()
            print(*run.key, f"at the end {run.curve[-1]}, trained {run.final}", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
