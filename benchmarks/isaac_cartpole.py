"""Isaac Lab's cart and pole on the CPU: PPO, fast SAC and MBPO, each in the modes `sync`, `batch` and `continuous`.

Each run is the whole command `freerun train --task Isaac-Cartpole-Direct` on the real Isaac Lab 3 (Newton, no Isaac
Sim), in a process of its own, and then `freerun eval` in another. Runs are kept in isaac_cartpole.json by (algorithm,
mode, seed): a further call adds the missing ones and drops none, so an interrupted benchmark continues. The settings
were chosen on seeds that are not reported (`--first-seed 100 --output ELSEWHERE`).

make test-isaac    # makes the Python environment with the simulator; this script starts itself there
python benchmarks/isaac_cartpole.py --max-minutes 30
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from catalogue import REPOSITORY
from pictures import is_drawn, make_plots, save
from run_file import RunFile, write_report

RESULTS = Path(__file__).parent / "results" / "isaac_cartpole"
ISAAC = REPOSITORY / "build" / "isaac"
TASK = "Isaac-Cartpole-Direct"
MODES = ("sync", "batch", "continuous")
MOST, REACHED = 5.0, 4.5
"""The most that an episode of five seconds returns, and the mean return at which the task counts as learned."""
NUM_TRIALS, TRIAL_SEED = 100, 77_000
MOST_TRIED = 10
"""About how many checkpoints of a run are tried: those of regular intervals and the best ones are kept."""
PACKAGES = ("isaaclab", "newton", "warp-lang")


@dataclass(frozen=True)
class Setup:
    """How an algorithm learns the task, in every mode."""

    name: str
    num_envs: int
    num_steps: int
    """Of each environment, in what is handed over at a time."""
    total_steps: int
    flags: str

    def flags_in(self, mode: str) -> str:
        # `continuous` counts the steps of all environments, as the original did.
        steps = f"--num-steps-per-env {self.num_steps}"
        if mode == "continuous":
            # Its queue of 1,000 batches would hold more than a whole run, so that a slow learner never got fresh steps.
            steps = f"--collection-batch-size {self.num_envs * self.num_steps} --max-queue-size 2"
        return f"--total-steps {self.total_steps} --num-envs {self.num_envs} {steps} {self.flags}"


SETUPS = {
    # Those of Isaac Lab's own config for RSL-RL, as far as freerun has them.
    "ppo": Setup(
        "PPO",
        1024,
        16,
        1_300_000,
        "--num-epochs 5 --minibatch-size 4096 --learning-rate 1e-3 "
        "--hidden-sizes 32 32 --entropy-coef 0.005 --value-coef 1.0 --max-grad-norm 1.0",
    ),
    # `continuous` drops steps, and an episode that has lost some enters no mean: checkpoints are tried instead.
    "fastsac": Setup(
        "fast SAC",
        128,
        4,
        100_000,
        "--env-args clip_actions 1.0 --updates-per-vector-step 8 --batch-size 256 --hidden-sizes 64 64 "
        "--learning-rate 1e-3 --checkpoint-every 10000 --keep-checkpoints 100",
    ),
    # After 8,000 steps of 32 environments hardly an episode of 300 steps has ended, and those of bad policies end
    # early: training returns say nothing of the policy.
    "mbpo": Setup(
        "MBPO",
        32,
        8,
        8_000,
        "--preset mbpo-small --env-args clip_actions 1.0 --initial-temperature 0.01 --rollouts-per-step 50 "
        "--model-updates-per-step 1 --model-learning-rate 3e-3 --checkpoint-every 1000 --keep-checkpoints 100",
    ),
}


@dataclass(frozen=True)
class Options:
    algorithms: tuple[str, ...] = tuple(SETUPS)
    """Who learns: ppo, fastsac, mbpo."""
    modes: tuple[str, ...] = MODES
    """How steps are collected."""
    seeds: int = 3
    """Runs of each: as many seeds, from --first-seed on."""
    first_seed: int = 0
    """Seeds from 100 on were for choosing settings."""
    flags: str = ""
    """More flags for every run, in one word, for trials of settings: --flags="--learning-rate 3e-4"."""
    run_minutes: float = 6.0
    """A run that takes longer has failed, and is left to the next call."""
    max_minutes: float | None = None
    """Begin no run after that."""
    again: bool = False
    """Run again what has finished before; a new result takes the place of the old one."""
    output: Path = RESULTS
    """Folder for isaac_cartpole.json, .md and .png."""
    report_only: bool = False
    """Write the report again, run nothing."""
    try_out: Path | None = None
    """Try the checkpoints of this run folder, and nothing else: this script calls itself so."""


@dataclass(frozen=True)
class Run:
    algorithm: str
    mode: str
    seed: int
    flags: str
    packages: dict[str, str]
    """Versions of the simulator's parts."""
    curve: list[tuple[int, float, float]]
    """(steps learned from, return, seconds since the first step): the mean of the last 100 training episodes or, where
    checkpoints were kept, of trials with the most likely actions, after the run."""
    num_steps: int
    """Steps learned from."""
    seconds: float
    """From the first step of the training to its last update."""
    start_seconds: float
    """What the whole command took beyond that: imports, the simulator's start, writing the last checkpoint."""
    steps_dropped: int
    """Steps that were collected and that nobody learned from."""
    mean_lag: float
    """How many updates old the weights were that chose an action, at the mean."""
    trained: float
    """The mean return of the trained policy: the most likely actions in one episode of each of 100 environments."""
    trained_deviation: float
    trained_least: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.algorithm, self.mode, self.seed


def run_one(options: Options, algorithm: str, mode: str, seed: int) -> Run:
    deadline = time.monotonic() + 60 * options.run_minutes
    flags = f"{SETUPS[algorithm].flags_in(mode)} {options.flags}".strip()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        began = time.monotonic()
        in_isaac_lab(
            *("-m", "freerun", "train", "--task", TASK, "--headless", "--device", "cpu", "--quiet"),
            *("--run-dir", str(run_dir)),
            *("--algo", algorithm, "--mode", mode, "--seed", str(seed), *flags.split()),
            seconds=deadline - time.monotonic(),
        )
        whole_seconds = time.monotonic() - began
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        words = ("-m", "freerun", "eval", str(run_dir), "--episodes", str(NUM_TRIALS))
        told = in_isaac_lab(*words, seconds=deadline - time.monotonic())
        curve = training_returns(records)
        if "--keep-checkpoints" in flags:
            curve = tried_checkpoints(run_dir, records, deadline - time.monotonic())
    found = re.search(r"return (-?[\d.]+) ± ([\d.]+) \(min (-?[\d.]+)", told)
    assert found is not None, told
    mean, deviation, least = map(float, found.groups())
    return Run(
        algorithm,
        mode,
        seed,
        flags,
        {name: importlib.metadata.version(name) for name in PACKAGES},
        curve,
        summary["env_steps"],
        summary["wall_seconds"],
        whole_seconds - summary["wall_seconds"],
        summary["dropped_steps"],
        summary["lag_mean"],
        mean,
        deviation,
        least,
    )


def tried_checkpoints(run_dir: Path, records: list[dict[str, Any]], seconds: float) -> list[tuple[int, float, float]]:
    """Mean returns of the checkpoints of a run. All are tried in one process, which starts the simulator once."""
    told = in_isaac_lab(__file__, "--try-out", str(run_dir), seconds=seconds)
    returns: dict[str, float] = json.loads(told.splitlines()[-1])
    moments = {record["update"]: (record["step"], record["wall_seconds"]) for record in records}
    points = [(*moments[int(update)], found) for update, found in returns.items() if int(update) in moments]
    return [(step, found, wall_seconds) for step, wall_seconds, found in points]


def try_out(run_dir: Path) -> None:
    """Print, as the last line, the mean return of each checkpoint's most likely actions in the same episodes."""
    from freerun import load_policy
    from freerun.adapters.isaac_lab import make_here
    from freerun.collecting.rollouts.evaluation_episodes import greedy
    from freerun.collecting.tensors.tensor_rollout import play_tensors

    env = make_here(TASK, NUM_TRIALS, "cpu", TRIAL_SEED, clip_actions=1.0)
    means = {}
    kept = sorted((run_dir / "checkpoints").glob("update-*"))
    for folder in kept[:: max(1, len(kept) // MOST_TRIED)]:
        returns, _ = play_tensors(env, greedy(load_policy(folder).actor), TRIAL_SEED)
        means[folder.name.partition("-")[2].lstrip("0") or "0"] = sum(returns) / len(returns)
    env.close()
    sys.stdout.flush()
    print("\n" + json.dumps(means), flush=True)
    os._exit(0)  # Isaac Lab writes lines of its own as it ends


def training_returns(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    known = [record for record in records if record.get("return_mean") is not None]
    return [(record["step"], record["return_mean"], record["wall_seconds"]) for record in known]


def in_isaac_lab(*words: str, seconds: float) -> str:
    """Run this Python, with the task's files from `make test-isaac`, and return its output."""
    return subprocess.run(
        [sys.executable, *words],
        env={"ISAACSIM_ASSET_ROOT": str(ISAAC / "assets"), **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=max(1.0, seconds),
    ).stdout


def go_to_isaac_lab() -> None:
    """Start this script again in the Python environment that has the simulator, so that stamps name its versions."""
    python = ISAAC / "bin" / "python"
    if importlib.util.find_spec("isaaclab") is not None:
        return
    if not python.exists() or Path(sys.prefix) == ISAAC:
        raise SystemExit("Isaac Lab is not installed: make test-isaac ISAAC_PYTHON=<a Python 3.12>")
    sys.stdout.flush()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    os.execve(python, [str(python), *sys.argv], environment)


# ---------------------------------------------------------------------------------------------- the report


def when_learned(run: Run) -> tuple[int, float] | None:
    """Steps and seconds."""
    return next(((step, seconds) for step, found, seconds in run.curve if found >= REACHED), None)


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    found = [f"{value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return found[0] if len(set(found)) == 1 else f"{found[0]} ({found[1]} – {found[2]})"


def cases(runs: list[Run]) -> list[tuple[str, str]]:
    return [
        (name, mode) for name in SETUPS for mode in MODES if any((r.algorithm, r.mode) == (name, mode) for r in runs)
    ]


def markdown(runs: list[Run]) -> str:
    lines = [
        "# Isaac Lab's cart and pole on the CPU",
        "",
        f"`{TASK}` of the real Isaac Lab 3, stepped by Newton on the CPU without Isaac Sim, learned by the whole "
        "command `freerun train` in a process of its own. An episode of five seconds, 300 steps, returns 5 at most: "
        "Isaac Lab multiplies rewards by the time of a step. A fallen pole ends no episode, so a bad policy returns "
        "less than one that leaves the track.",
        "",
        f"*Learned* is the first moment with a mean return of {REACHED:g}. For PPO that of the last {NUM_TRIALS} "
        "training episodes, with the noise of exploration: it tells of a policy late, because an episode takes 300 "
        "steps and all environments step at once. For fast SAC and MBPO that of the most likely actions of ten to "
        "twenty checkpoints of the run, in one episode of each of "
        f"{NUM_TRIALS} environments; they were tried after the run, so this took none of its time. So rows of PPO and "
        "of the others do not compare to the step. Later returns may be lower again, as the curves show. "
        "*Trained* is the policy at the end, as `freerun eval` finds it in "
        f"{NUM_TRIALS} episodes. *Dropped* are steps that were collected and not learned from, as a share of all. "
        "*Lag* is the mean number of updates by which weights that chose an action were old. Medians (lowest – "
        "highest) over seeds.",
        "",
        "| | mode | seeds | learned | steps until then | seconds until then | trained | steps in all | seconds in all "
        "| steps/s | dropped | lag |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, mode in cases(runs):
        mine = [run for run in runs if (run.algorithm, run.mode) == (name, mode)]
        found = [moment for run in mine if (moment := when_learned(run)) is not None]
        steps = [run.num_steps for run in mine]
        cells = [SETUPS[name].name, mode, str(len(mine)), str(len(found))]
        cells += [spread([float(moment[part]) for moment in found], part) for part in (0, 1)]
        cells += [spread([run.trained for run in mine], 2), f"{median(steps):,.0f}"]
        cells += [spread([run.seconds for run in mine], 0)]
        cells += [f"{median(run.num_steps / run.seconds for run in mine):,.0f}"]
        shares = [run.steps_dropped / (run.steps_dropped + run.num_steps) for run in mine]
        cells += [f"{median(shares):.0%}", f"{median(run.mean_lag for run in mine):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    start = [run.start_seconds for run in runs]
    lines += [
        "",
        f"*Seconds* are those of the training. The command takes {spread(start, 0)} more: imports, the simulator's "
        "start, the last checkpoint. Isaac Lab's kernels had been compiled before, which happens once per machine. "
        "The machine has two cores, and other programs used it meanwhile (*others used of it*, below), so "
        "seconds are no measure of what an idle machine does.",
        "",
        "Flags, besides `--device cpu --headless --mode MODE --seed SEED`:",
        "",
    ]
    for name, setup in SETUPS.items():
        for flags in dict.fromkeys(run.flags for run in runs if run.algorithm == name):
            modes = dict.fromkeys(run.mode for run in runs if (run.algorithm, run.flags) == (name, flags))
            lines.append(
                f"- {setup.name}, {', '.join(mode for mode in MODES if mode in modes)}: `--algo {name} {flags}`"
            )
    packages = sorted({", ".join(f"{key} {value}" for key, value in run.packages.items()) for run in runs})
    lines += ["", f"Simulator: {'; '.join(packages)}. `benchmarks/isaac_cartpole.py` wrote this.", ""]
    lines.append("![Returns by steps and by seconds](isaac_cartpole.png)")
    return "\n".join(lines).replace("%", " %") + "\n"


def draw(runs: list[Run], path: Path) -> None:
    names = [name for name in SETUPS if any(run.algorithm == name for run in runs)]
    figure, plots = make_plots(2 * len(names))
    for number, plot in enumerate(plots):
        name, is_by_steps = names[number % len(names)], number < len(names)
        for run in (run for run in runs if run.algorithm == name):
            steps, scores, seconds = zip(*run.curve, strict=True)
            plot.plot(steps if is_by_steps else seconds, scores, color=f"C{MODES.index(run.mode)}", alpha=0.7)
        plot.axhline(REACHED, color="grey", linewidth=0.8, linestyle="--")
        plot.set(title=SETUPS[name].name, xlabel="steps" if is_by_steps else "seconds", ylabel="return")
        plot.set_ylim(-6, MOST + 0.2)
    save(figure, path, [plots[0].plot([], [], color=f"C{place}", label=mode)[0] for place, mode in enumerate(MODES)])


def write_reports(folder: Path) -> str:
    file, picture = RunFile(folder / "isaac_cartpole.json", Run), folder / "isaac_cartpole.png"
    runs = sorted(file.records, key=lambda run: run.key)
    if not is_drawn(picture):
        draw(runs, picture)
    return write_report(folder / "isaac_cartpole.md", markdown(runs), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if not options.report_only:
        go_to_isaac_lab()
    if options.try_out is not None:
        try_out(options.try_out)
    file = RunFile(options.output / "isaac_cartpole.json", Run)
    found = {run.key for run in file.records} if not options.again else set()
    wanted = [
        (algorithm, mode, options.first_seed + number)
        for number in range(0 if options.report_only else options.seeds)
        for algorithm in options.algorithms
        for mode in options.modes
        if (algorithm, mode, options.first_seed + number) not in found
    ]
    last_begin = None if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
    for case in wanted:
        if last_begin is not None and time.monotonic() > last_begin:
            print("The time is up: call again for the other runs.")
            break
        try:
            run = run_one(options, *case)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(*case, f"has no result: {type(error).__name__}", flush=True)
            continue
        file.replace(run, "algorithm", "mode", "seed")
        print(*case, f"learned {when_learned(run)}, {run.seconds:.0f} s, trained {run.trained}", flush=True)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
