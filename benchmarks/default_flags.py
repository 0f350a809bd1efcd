"""How much of a machine's limit does a training reach with the flags that people type?

The limit is that of the environments alone: as many processes as there are workers, which only step. A training is the
whole command with all its outputs, and its speed is that of its last two thirds. Limit and trainings take turns, and a
result is their ratio within one repetition. Beside them, EnvPool collects CartPole without learning, where it is
installed: here, or by `benchmarks/peers.py --install --systems envpool`. Some cases are for a machine with a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import peers
import torch
import tyro
from run_file import ResultFile, write_report

from freerun_envs.straggler import Straggler

LIMIT_SECONDS = 8.0
STRAGGLER, HALF_CHEETAH, CART_POLE = "freerun/Straggler-v0", "HalfCheetah-v5", "CartPole-v1"
VECTOR = "vector:"


@dataclass(frozen=True)
class Case:
    """A command whose speed is compared with the limit."""

    env: str
    num_processes: int
    """The processes of the limit."""
    flags: tuple[str, ...]
    is_envpool_alone: bool = False
    """EnvPool collects instead, as in peers.py, and nothing is learned."""
    needs_gpu: bool = False


HUNDRED, TEN_THOUSAND = ("--num-workers", "100"), ("--steps-per-update", "10000")
CASES = {
    "Straggler × 100, no other flags": Case(STRAGGLER, 100, (*HUNDRED, "--total-steps", "200000")),
    "Straggler × 100, 10,000 steps, 4 epochs of 256": Case(
        STRAGGLER,
        100,
        (*HUNDRED, *TEN_THOUSAND, "--num-epochs", "4", "--minibatch-size", "256", "--total-steps", "400000"),
    ),
    "Straggler × 100, as in peers.py": Case(
        STRAGGLER,
        100,
        (
            *(*HUNDRED, *TEN_THOUSAND, "--num-epochs", "4", "--minibatch-size", "2000", "--segment-steps", "25"),
            *("--total-steps", "400000"),
        ),
    ),
    "HalfCheetah × 2, no other flags": Case(HALF_CHEETAH, 2, ("--num-workers", "2", "--total-steps", "250000")),
    "HalfCheetah × 12 beside a GPU, --device auto": Case(
        HALF_CHEETAH, 12, ("--num-workers", "12", "--device", "auto", "--total-steps", "1000000"), needs_gpu=True
    ),
    "HalfCheetah, SAC on a GPU, one update per step": Case(
        HALF_CHEETAH, 1, ("--algo", "sac", "--device", "cuda", "--total-steps", "100000"), needs_gpu=True
    ),
    "CartPole × 2 × 32, no other flags": Case(
        CART_POLE, 2, ("--num-workers", "2", "--envs-per-worker", "32", "--total-steps", "400000")
    ),
    "CartPole × 2 × 32, as in peers.py": Case(
        CART_POLE,
        2,
        (
            *("--num-workers", "2", "--envs-per-worker", "32", "--segment-steps", "156", "--steps-per-update", "9984"),
            *("--num-epochs", "4", "--minibatch-size", "2000", "--total-steps", "1500000"),
        ),
    ),
    "CartPole × 2 × 32 in Gymnasium's vector version, as in peers.py": Case(
        f"{VECTOR}{CART_POLE}",
        2,
        (
            *("--num-workers", "2", "--envs-per-worker", "32", "--segment-steps", "156", "--steps-per-update", "9984"),
            *("--num-epochs", "4", "--minibatch-size", "2000", "--total-steps", "1500000"),
        ),
    ),
    "CartPole × 64, EnvPool with 2 threads, collecting alone": Case(CART_POLE, 2, (), is_envpool_alone=True),
}


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = tuple(CASES)
    """What is measured; results of the others stay."""
    repeats: int = 5
    output: Path = Path(__file__).parent / "results" / "default_flags"


def step_for(env_id: str, together: Any, speeds: Any) -> None:
    """Step an environment with one action for a while, from the moment when all processes are ready."""
    env: Any = Straggler() if env_id == STRAGGLER else gymnasium.make(env_id.removeprefix(VECTOR))
    env.reset(seed=0)
    action = env.action_space.sample()
    together.wait()
    begun, num_steps = time.perf_counter(), 0
    while time.perf_counter() - begun < LIMIT_SECONDS:
        _, _, terminated, truncated, _ = env.step(action)
        num_steps += 1
        if terminated or truncated:
            env.reset()
    speeds.put(num_steps / (time.perf_counter() - begun))


def limit(case: Case) -> float:
    """Steps per second of the environments alone."""
    context = multiprocessing.get_context("fork")  # a hundred processes start at once
    together, speeds = context.Barrier(case.num_processes), context.Queue()
    workers = [context.Process(target=step_for, args=(case.env, together, speeds)) for _ in range(case.num_processes)]
    for worker in workers:
        worker.start()
    total = sum(float(speeds.get(timeout=60)) for _ in workers)
    for worker in workers:
        worker.join()
    return total


@dataclass(frozen=True)
class Speed:
    steps_per_second: float
    busy: float | None = None
    """The share of their time in which workers stepped environments."""


def train(case: Case) -> Speed:
    """The speed of a training, without its first third."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "freerun", "train", case.env, *case.flags, "--run-dir", str(run_dir)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, *rest = records[len(records) // 3 :]
    busy = sum(one["workers_busy_share"] * one["interval_seconds"] for one in rest)
    seconds = rest[-1]["wall_seconds"] - first["wall_seconds"]
    return Speed((rest[-1]["step"] - first["step"]) / seconds, busy / sum(one["interval_seconds"] for one in rest))


def envpool_python() -> Path | None:
    """An interpreter that has EnvPool; None if there is none."""
    if importlib.util.find_spec("envpool") is not None:
        return Path(sys.executable)
    own = peers.interpreter("envpool")
    return own if own.exists() else None


def collect_by_envpool(python: Path) -> Speed:
    """The speed of EnvPool with a policy, without learning: the runner of peers.py."""
    runner = Path(__file__).parent / "peer_runners" / "envpool_async.py"
    command = [str(python), str(runner), "--workload", "cartpole", "--seconds", str(LIMIT_SECONDS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return Speed(json.loads(done.stdout.splitlines()[-1])["steps_per_second"])


def measure(case: Case, python: Path | None) -> Speed:
    return collect_by_envpool(python) if case.is_envpool_alone and python is not None else train(case)


def can_run(case: Case, python: Path | None) -> bool:
    return torch.cuda.is_available() if case.needs_gpu else python is not None or not case.is_envpool_alone


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "Steps per second of a whole training, as a share of the limit of the environments alone: median (lowest – "
        "highest). *Busy* is the share of their time in which the workers stepped environments. "
        "`benchmarks/default_flags.py` wrote this.",
        "",
        "| | steps/s | limit | share | busy | repetitions |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in (name for name in CASES if name in results):
        found = results[name]
        shares = [speed / most for speed, most in zip(found["speeds"], found["limits"], strict=True)]
        speed, most = statistics.median(found["speeds"]), statistics.median(found["limits"])
        busy = [one for one in found.get("busy", ()) if one is not None]
        lines.append(
            f"| {name} | {speed:,.0f} | {most:,.0f} | {table_cell(shares)} | {table_cell(busy)} | {len(shares)} |"
        )
    return "\n".join(lines) + "\n"


def table_cell(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} – {max(shares):.0%})" if shares else "–"


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "default_flags.json", {})
    return write_report(folder / "default_flags.md", markdown(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = ResultFile(options.output / "default_flags.json", {})
    results = file.content
    python = envpool_python()
    cases = [name for name in options.cases if can_run(CASES[name], python)]
    for name in set(options.cases) - set(cases):
        print(f"{name} is left out: {'there is no GPU' if CASES[name].needs_gpu else 'EnvPool is not installed'}")
    for name in cases:
        results[name] = {"limits": [], "speeds": [], "busy": [], "flags": CASES[name].flags}
    for _ in range(options.repeats):
        for name in cases:
            results[name]["limits"].append(limit(CASES[name]))
            speed = measure(CASES[name], python)
            results[name]["speeds"].append(speed.steps_per_second)
            results[name]["busy"].append(speed.busy)
    file.save(*cases)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
