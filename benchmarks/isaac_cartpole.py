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
NUM_TRIALS = 100
PACKAGES = ("isaaclab", "newton", "warp-lang")


@dataclass(frozen=True)
class Setup:
    """How an algorithm learns the task, in every mode."""

    name: str
    num_envs: int
    total_steps: int
    flags: str


SETUPS = {
    # Those of Isaac Lab's own config for RSL-RL, as far as freerun has them.
    "ppo": Setup(
        "PPO",
        1024,
        1_500_000,
        "--num-steps-per-env 16 --num-epochs 5 --minibatch-size 4096 --learning-rate 1e-3 --hidden-sizes 32 32 "
        "--entropy-coef 0.005 --value-coef 1.0 --max-grad-norm 1.0",
    ),
    "fastsac": Setup(
        "fast SAC",
        128,
        200_000,
        "--env-args clip_actions 1.0 --num-steps-per-env 4 --updates-per-vector-step 8 --batch-size 512 "
        "--hidden-sizes 64 64 --learning-rate 1e-3",
    ),
    "mbpo": Setup(
        "MBPO",
        32,
        20_000,
        "--preset mbpo-small --env-args clip_actions 1.0 --num-steps-per-env 4",
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


@dataclass(frozen=True)
class Run:
    algorithm: str
    mode: str
    seed: int
    num_envs: int
    flags: str
    packages: dict[str, str]
    """Versions of the simulator's parts."""
    curve: list[tuple[int, float, float]]
    """(steps learned from, mean return of the last 100 training episodes, seconds since learning could begin)."""
    seconds: float
    """Of the training, from its first step to its last update."""
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
    setup, deadline = SETUPS[algorithm], time.monotonic() + 60 * options.run_minutes
    flags = f"{setup.flags} {options.flags}".strip()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        began = time.monotonic()
        freerun(
            *("train", "--task", TASK, "--headless", "--device", "cpu", "--quiet", "--run-dir", str(run_dir)),
            *("--algo", algorithm, "--mode", mode, "--seed", str(seed), "--num-envs", str(setup.num_envs)),
            *("--total-steps", str(setup.total_steps), *flags.split()),
            seconds=deadline - time.monotonic(),
        )
        whole_seconds = time.monotonic() - began
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        told = freerun("eval", str(run_dir), "--episodes", str(NUM_TRIALS), seconds=deadline - time.monotonic())
    found = re.search(r"return (-?[\d.]+) ± ([\d.]+) \(min (-?[\d.]+)", told)
    assert found is not None, told
    mean, deviation, least = map(float, found.groups())
    lags = [record["lag_mean"] for record in records if record.get("lag_mean") is not None]
    return Run(
        algorithm,
        mode,
        seed,
        setup.num_envs,
        flags,
        {name: importlib.metadata.version(name) for name in PACKAGES},
        [(r["step"], r["return_mean"], r["wall_seconds"]) for r in records if r.get("return_mean") is not None],
        summary["wall_seconds"],
        whole_seconds - summary["wall_seconds"],
        summary["steps_dropped"],
        sum(lags) / max(1, len(lags)),
        mean,
        deviation,
        least,
    )


def freerun(*words: str, seconds: float) -> str:
    """Run a command of freerun in this Python, with the task's files from `make test-isaac`, and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "freerun", *words],
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


def markdown(runs: list[Run]) -> str:
    return ""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if not options.report_only:
        go_to_isaac_lab()
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


if __name__ == "__main__":
    main()
