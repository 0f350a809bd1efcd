"""The limit: environments in as many processes, stepped with random actions and nothing else. Imports no torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

import gymnasium
import numpy as np

from freerun.benching.machine import LoadMeter, own_megabytes, own_seconds
from freerun.core import EnvFailure, UserError
from freerun.envs.gymnasium import GymnasiumFactory
from freerun.transport import processes

NUM_ACTIONS = 1000
"""Drawn before and used again and again: drawing one can take as long as a step."""
LOOK_SECONDS = 0.01
START_SECONDS = 120.0


def measure(factory: GymnasiumFactory, num_workers: int, seconds: float) -> dict[str, float]:
    """Rates of all processes together, once each of them has ended its first step."""
    began = time.perf_counter()
    with stepping(factory, num_workers) as (counts, _):
        startup_seconds = time.perf_counter() - began
        meter, used = LoadMeter(), own_seconds()
        began, before = time.perf_counter(), counts.sum(axis=0)
        time.sleep(seconds)
        elapsed, after = time.perf_counter() - began, counts.sum(axis=0)
        load, used = meter.read(), own_seconds() - used
        steps, episodes = (after - before).tolist()
        return {
            "steps_per_second": steps / elapsed,
            "episodes_per_second": episodes / elapsed,
            "startup_seconds": startup_seconds,
            "memory_megabytes": own_megabytes(),
            "cpu_percent": load.own,
            "others_percent": load.others,
            "cpu_seconds_per_step": used / max(steps, 1),
            # Of those that have ended; where none has, it is at least as long as what was seen of it.
            "episode_steps": steps / episodes if episodes else steps / num_workers,
        }


@contextmanager
def stepping(factory: GymnasiumFactory, num_workers: int) -> Iterator[tuple[Any, list[ForkServerProcess]]]:
    """Counts of steps and episodes, [worker, 2], which go up meanwhile, and the processes that count."""
    processes.preload([__name__])
    shared = processes.context().RawArray("q", 2 * num_workers)
    counts = np.frombuffer(shared, np.int64).reshape(num_workers, 2)
    workers = [processes.start(_step_on, factory, shared, worker) for worker in range(num_workers)]
    try:
        deadline = time.monotonic() + START_SECONDS
        while not counts[:, 0].all():
            if any(worker.exitcode is not None for worker in workers):
                raise EnvFailure("the environment failed with random actions: freerun check-env says more")
            if time.monotonic() > deadline:
                raise UserError(
                    f"no step of {factory.env} has ended after {START_SECONDS:g} s: it is too slow to bench"
                )
            time.sleep(LOOK_SECONDS)
        yield counts, workers
    finally:
        processes.stop(workers, 0.0)


def _step_on(factory: GymnasiumFactory, shared: Any, worker: int) -> None:
    processes.enter_worker()
    counts = np.frombuffer(shared, np.int64)[2 * worker : 2 * worker + 2]
    env: gymnasium.Env[Any, Any] = factory.make_lane().env
    env.action_space.seed(worker)
    actions = itertools.cycle([env.action_space.sample() for _ in range(NUM_ACTIONS)])
    for episode in itertools.count():
        env.reset(seed=worker + 1_000_003 * episode)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(next(actions))
            ended = terminated or truncated
            counts[0] += 1
        counts[1] += 1
