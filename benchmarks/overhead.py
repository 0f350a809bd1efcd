"""What a worker spends on a step besides the environment's own, and what a publication of weights costs it.

Processor time in one process (the lowest of several repetitions: noise only adds), and the same with a hundred
processes on this machine's cores, where caches are cold at every step (the mean of all).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from run_file import ResultFile, write_report

import freerun.adapters.catalog  # noqa: F401 - registers Straggler
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.transport import processes
from freerun.transport.weights_board import WeightsBoard

TWO_MEGABYTES = 2_000_000 // 4
NUM_PROCESSES = 100
CROWD_SECONDS = 6.0

Advance = Callable[[], int]
"""Steps a little; returns how many steps."""


@dataclass(frozen=True)
class Options:
    repeats: int = 5
    """How often each figure is taken."""
    output: Path = Path(__file__).parent / "results" / "overhead"
    """Folder for overhead.json and overhead.md."""


def bare(env_id: str) -> Advance:
    env = gymnasium.make(env_id, disable_env_checker=True)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = itertools.cycle([env.action_space.sample() for _ in range(1000)])

    def advance() -> int:
        for _ in range(100):
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()
        return 100

    return advance


def worker(env_id: str, num_envs: int, segment_steps: int | None) -> Advance:
    factory = GymnasiumFactory(env_id)
    spec = ActorSpec.of(factory.spec, (64, 64), "tanh")
    policy = MLPActor(spec, scalar_actions=factory.spec.action_shape == ())
    policy.load(np.random.default_rng(0).normal(0, 0.1, policy.weights.size).astype(np.float32))
    rollout: Any
    if num_envs == 1:
        rollout = SingleEnvRollout(factory.make_one(), factory.spec, policy, run_seed=0)
    else:
        rollout = Rollout(factory.make(num_envs), policy, run_seed=0)
    numbers = next_from(itertools.count())
    segments = rollout.episodes(numbers) if segment_steps is None else rollout.segments(segment_steps, numbers)
    return lambda: int(next(segments).num_steps)


def seconds_per_step(advance: Advance, repeats: int) -> list[float]:
    advance()
    found = []
    for _ in range(repeats):
        started, num_steps = time.process_time(), 0
        while time.process_time() - started < 0.5:
            num_steps += advance()
        found.append((time.process_time() - started) / num_steps)
    return found


def crowd(make: Callable[..., Advance], *arguments: Any) -> tuple[float, float]:
    """A hundred processes at once: processor seconds per step, and steps per second in sum."""
    context = processes.context()
    barrier, queue = context.Barrier(NUM_PROCESSES), context.SimpleQueue()
    started = [
        context.Process(target=_one_of_many, args=(barrier, queue, make, arguments)) for _ in range(NUM_PROCESSES)
    ]
    for process in started:
        process.start()
    found = [queue.get() for _ in started]
    for process in started:
        process.join()
    return statistics.mean(cpu for cpu, _ in found), sum(rate for _, rate in found)


def _one_of_many(
    barrier: Barrier, queue: multiprocessing.SimpleQueue[Any], make: Callable[..., Advance], arguments: tuple[Any, ...]
) -> None:
    processes.enter_worker()
    advance = make(*arguments)
    barrier.wait()
    started, used, num_steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < CROWD_SECONDS:
        num_steps += advance()
    seconds = time.perf_counter() - started
    queue.put(((time.process_time() - used) / num_steps, num_steps / seconds))


def publication(repeats: int) -> dict[str, float]:
    """Medians for 2 MB of weights; the pages are warm, as they are in a run from the third version on."""
    board = WeightsBoard(processes.context(), TWO_MEGABYTES)
    weights = np.random.default_rng(0).normal(size=TWO_MEGABYTES).astype(np.float32)
    publishing: list[float] = []
    looking: list[float] = []
    reading: list[float] = []
    for version in range(20 * repeats):
        times = [time.perf_counter()]
        board.publish(weights, version)
        times.append(time.perf_counter())
        assert board.version == version
        times.append(time.perf_counter())
        board.read()
        times.append(time.perf_counter())
        for sink, (start, end) in zip((publishing, looking, reading), itertools.pairwise(times), strict=True):
            sink.append(1e6 * (end - start))
    return {
        "publish_microseconds": statistics.median(publishing),
        "look_microseconds": statistics.median(looking),
        "read_microseconds": statistics.median(reading),
    }


def measure(options: Options) -> dict[str, Any]:
    cases: list[tuple[str, str, int, int | None]] = [
        ("CartPole-v1, 1 environment, whole episodes", "CartPole-v1", 1, None),
        ("CartPole-v1, 1 environment, segments of 128", "CartPole-v1", 1, 128),
        ("CartPole-v1, 32 environments, segments of 128", "CartPole-v1", 32, 128),
        ("HalfCheetah-v5, 1 environment, whole episodes", "HalfCheetah-v5", 1, None),
        ("HalfCheetah-v5, 4 environments, segments of 250", "HalfCheetah-v5", 4, 250),
    ]
    rows = []
    for name, env_id, num_envs, segment_steps in cases:
        bare_seconds = min(seconds_per_step(bare(env_id), options.repeats))
        worker_seconds = min(seconds_per_step(worker(env_id, num_envs, segment_steps), options.repeats))
        rows.append(
            {"case": name, "bare_microseconds": 1e6 * bare_seconds, "worker_microseconds": 1e6 * worker_seconds}
        )
        print(rows[-1], flush=True)
    processes.preload(
        ["freerun.collecting.workers.worker", "freerun.adapters.gymnasium_envs", "freerun_envs.straggler"]
    )
    straggler = "freerun/Straggler-v0"
    for name, segment_steps in (("whole episodes", None), ("segments of 20", 20)):
        bare_seconds, bare_rate = crowd(bare, straggler)
        worker_seconds, worker_rate = crowd(worker, straggler, 1, segment_steps)
        rows.append(
            {
                "case": f"Straggler, {NUM_PROCESSES} processes at once, {name}",
                "bare_microseconds": 1e6 * bare_seconds,
                "worker_microseconds": 1e6 * worker_seconds,
                "share_of_bare_steps": worker_rate / bare_rate,
            }
        )
        print(rows[-1], flush=True)
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "steps": rows,
        "publication": publication(options.repeats),
    }


def table(report: dict[str, Any]) -> str:
    published = report["publication"]
    lines = [
        f"Processor time of a step, µs, {report['machine']['cores']} cores: the environment alone (actions drawn "
        "before), and a worker: 64-64 tanh policy, sampling, recording, log-probabilities, resets.",
        "",
        "| case | environment alone | worker | overhead |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in report["steps"]:
        alone, whole = row["bare_microseconds"], row["worker_microseconds"]
        lines.append(f"| {row['case']} | {alone:.1f} | {whole:.1f} | {whole - alone:.1f} |")
    lines += [
        "",
        f"2 MB of weights: the learner publishes them in {published['publish_microseconds']:,.0f} µs. A worker looks "
        f"for a new version in {published['look_microseconds']:.1f} µs, once per episode or segment, and copies one in "
        f"{published['read_microseconds']:,.0f} µs, once per update.",
    ]
    return "\n".join(lines) + "\n"


def open_results(folder: Path) -> ResultFile:
    def rows(report: dict[str, Any]) -> list[str]:
        return [*(row["case"] for row in report["steps"]), "weights"]

    return ResultFile(folder / "overhead.json", {}, rows)


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    return write_report(folder / "overhead.md", table(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = open_results(options.output)
    file.content = measure(options)
    file.save(*(row for row, _ in file.stamped()))
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
