"""What does `--learner-threads auto` gain beside one thread?

Each case is a whole command with all its outputs; its speed is that of its last two thirds, as in default_flags.py.
Both ways take turns, and a result is their ratio within one repetition. SAC computes in numpy, which `auto` leaves with
one thread. In the last case the workers keep all cores busy, so that there is nothing to gain, and nothing should be
lost. Breakout needs `pip install 'freerun[atari]'`.

With --compiled: what do 1, 2 and 4 threads give PPO's compiled learner, and what `auto`? It needs as many cores. Single
updates are timed in this process, on made-up steps with the shapes of HalfCheetah; all numbers of threads take turns
with the same learner, because they change no result. The whole training needs a core for each worker besides.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from default_flags import Case, train
from gymnasium import spaces
from run_file import ResultFile, write_report

from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, Segment
from freerun.settings.factories import limit_threads
from freerun.tools.bench.load_meter import num_cores

BREAKOUT = "PPO from pixels, Breakout × 8"
CASES = {
    "SAC, HalfCheetah": Case("HalfCheetah-v5", 1, ("--algo", "sac", "--total-steps", "10000")),
    BREAKOUT: Case(
        "ALE/Breakout-v5", 8, ("--preset", "atari-breakout", "--num-workers", "8", "--total-steps", "12288")
    ),
    "PPO with a memory, HalfCheetah × 2": Case(
        "HalfCheetah-v5", 2, ("--memory", "gru", "--num-workers", "2", "--total-steps", "150000")
    ),
    "PPO by torch, HalfCheetah × 2, cores full": Case(
        "HalfCheetah-v5",
        2,
        ("--learner", "torch", "--num-epochs", "1", "--num-workers", "2", "--total-steps", "250000"),
    ),
}
WAYS = ("1", "auto")
NUM_THREADS = (1, 2, 4)
UPDATES = {f"PPO's update, minibatches of {size}": size for size in (64, 256, 1024)}
"""Minibatch sizes of single updates of the compiled learner, by the names of their rows."""
COMPILED_TRAINING = "PPO, HalfCheetah × 12"
COMPILED_CASE = Case("HalfCheetah-v5", 12, ("--num-workers", "12", "--total-steps", "2000000"))
SEGMENTS, SEGMENT_STEPS = 7, 341
"""What an update learns from with twelve workers and default flags: 2,387 steps."""
UPDATES_PER_REPETITION = 10


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = tuple(CASES)
    """What is measured; results of the others stay."""
    compiled: bool = False
    """Measure PPO's compiled learner instead of the cases."""
    repeats: int = 5
    output: Path = Path(__file__).parent / "results" / "learner_threads"


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "Steps per second of a whole training with one thread of the learner and with `--learner-threads auto`, on two "
        "cores: median (lowest – highest). `benchmarks/learner_threads.py` wrote this.",
        "",
        "| | 1 thread | `auto` | `auto` / 1 thread | repetitions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in (name for name in CASES if name in results):
        one, auto = (results[name][way] for way in WAYS)
        ratios = [more / fewer for more, fewer in zip(auto, one, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(one):,.0f} | {statistics.median(auto):,.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f}) | {len(ratios)} |"
        )
    return "\n".join([*lines, *markdown_of_compiled(results)]) + "\n"


def markdown_of_compiled(results: dict[str, Any]) -> list[str]:
    """The second table: a row for each update and training of the compiled learner, and a column for each way."""
    names = [name for name in (*UPDATES, COMPILED_TRAINING) if name in results]
    if not names:
        return []
    ways = [*map(str, NUM_THREADS), "auto"]
    lines = [
        "",
        "PPO's compiled learner by its threads: milliseconds of an update of 2,387 steps, and steps per second of a "
        "whole training; and how many times as fast as with one thread.",
        "",
        f"| | 1 thread | {' | '.join(f'{number} threads' for number in NUM_THREADS[1:])} | `auto` |",
        f"| --- |{' ---: |' * len(ways)}",
    ]
    for name in names:
        cells, found = [], results[name]
        for way in ways:
            if way not in found:
                cells.append("")
                continue
            ratios = [taken / one for taken, one in zip(found[way], found["1"], strict=True)]
            times = statistics.median(ratios) if name == COMPILED_TRAINING else 1 / statistics.median(ratios)
            shown, unit = (",.0f", "steps/s") if name == COMPILED_TRAINING else (".2f", "ms")
            cells.append(f"{statistics.median(found[way]):{shown}} {unit} ({times:.2f} ×)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def write_reports(folder: Path) -> str:
    file = ResultFile(folder / "learner_threads.json", {})
    return write_report(folder / "learner_threads.md", markdown(file.content), file.stamped())


def made_up_ppo(minibatch_size: int) -> tuple[PPO, list[Segment]]:
    """PPO with HalfCheetah's shapes, and segments to learn from."""
    env = EnvSpec(spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32))
    ppo = PPO(env, PPOConfig(minibatch_size=minibatch_size, learner="fast"), 0, "cpu", False)
    rng, segments = np.random.default_rng(0), []
    for episode in range(SEGMENTS):
        obs, action, reward = (rng.standard_normal((SEGMENT_STEPS, 1, *size), np.float32) for size in ((17,), (6,), ()))
        number, no = np.full((SEGMENT_STEPS, 1), episode), np.zeros((SEGMENT_STEPS, 1), np.bool_)
        log_prob = np.full((SEGMENT_STEPS, 1), -8, np.float32)
        # As if each had been collected with the weights before, so that the actor's log-probabilities are needed too.
        segments.append(Segment(obs, action, log_prob, reward, no, no, obs, number, 0 * number, 0.0))
    return ppo, segments


def measure_updates(minibatch_size: int, num_threads: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of an update, by the number of threads: medians, one for each repetition."""
    kernel = compiled_kernel()
    if kernel is None:
        raise SystemExit("There is no compiled learner here: it needs a C compiler.")
    limit_threads(1, 1)
    ppo, segments = made_up_ppo(minibatch_size)
    found: dict[str, list[float]] = {str(number): [] for number in num_threads}
    for repeat in range(repeats + 1):
        for number in num_threads:
            kernel.set_threads(number)
            taken = []
            for _ in range(UPDATES_PER_REPETITION):
                began = time.perf_counter()
                ppo.observe(segments)
                ppo.update(1, 0.0)
                taken.append(1000 * (time.perf_counter() - began))
            if repeat:  # the first one allocates memory and starts threads
                found[str(number)].append(statistics.median(taken))
    kernel.set_threads(1)
    return found


def measure_compiled(file: ResultFile, repeats: int) -> None:
    num_threads = [number for number in NUM_THREADS if number <= num_cores()]
    for name, size in UPDATES.items():
        file.content[name] = measure_updates(size, num_threads, repeats)
        print(name, file.content[name], flush=True)
    measured = list(UPDATES)
    if num_cores() <= COMPILED_CASE.num_processes:
        print(f"{COMPILED_TRAINING} is left out: it needs more than {COMPILED_CASE.num_processes} cores")
    else:
        ways = [*map(str, num_threads), "auto"]
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                flags = (*COMPILED_CASE.flags, "--learner-threads", way)
                speeds[way].append(train(Case(COMPILED_CASE.env, COMPILED_CASE.num_processes, flags)).steps_per_second)
                print(f"{COMPILED_TRAINING}, {way}: {speeds[way][-1]:,.0f} steps/s", flush=True)
        file.content[COMPILED_TRAINING] = speeds
        measured.append(COMPILED_TRAINING)
    file.save(*measured)
    print(write_reports(file.path.parent))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = ResultFile(options.output / "learner_threads.json", {})
    if options.compiled:
        measure_compiled(file, options.repeats)
        return
    cases = [name for name in options.cases if name != BREAKOUT or importlib.util.find_spec("ale_py")]
    for name in set(options.cases) - set(cases):
        print(f"{name} is left out: ale-py is not installed")
    measured: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in cases}
    for _ in range(options.repeats):
        for name in cases:
            for way in WAYS:
                case = CASES[name]
                with_threads = Case(case.env, case.num_processes, (*case.flags, "--learner-threads", way))
                measured[name][way].append(train(with_threads).steps_per_second)
                print(f"{name}, {way}: {measured[name][way][-1]:,.0f} steps/s", flush=True)
    file.content.update(measured)
    file.save(*cases)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
