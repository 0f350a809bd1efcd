"""Measures the bare limit: worker processes that only step environments with random actions. It imports no torch."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from freerun.adapters.action_masks import RandomAllowedActions
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.core import EnvFailure, UserError
from freerun.tools.bench.load_meter import LoadMeter, own_megabytes, own_seconds
from freerun.transport import processes

NUM_ACTIONS = 1000
"""Random actions are drawn in advance and reused, because drawing one can take as long as a step."""
POLL_SECONDS = 0.01
START_SECONDS = 120.0


def measure(factory: GymnasiumFactory, num_workers: int, seconds: float) -> dict[str, float]:
    """Return the rates of all processes together, measured after each of them has made its first step."""
    began = time.perf_counter()
    with stepping(factory, num_workers) as (counts, _):
        startup_seconds = time.perf_counter() - began
        # All workers step by now, so start-up does not count.
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
            # The mean length of an episode. Where none has ended, it is at least as long as what was seen of it.
            "episode_steps": steps / episodes if episodes else steps / num_workers,
        }


@contextmanager
def stepping(
    factory: GymnasiumFactory, num_workers: int
) -> Iterator[tuple[NDArray[np.int64], list[ForkServerProcess]]]:
    """Start the processes; yield their counts of steps and episodes, and the processes.

    The counts, [worker, 2], keep rising while the processes step.
    """
    processes.preload([__name__])
    shared = processes.context().RawArray("q", 2 * num_workers)
    counts = np.frombuffer(shared, np.int64).reshape(num_workers, 2)
    workers = [processes.start(_step_forever, factory, shared, worker) for worker in range(num_workers)]
    try:
        deadline = time.monotonic() + START_SECONDS
        while not counts[:, 0].all():
            if any(worker.exitcode is not None for worker in workers):
                raise EnvFailure("the environment failed with random actions: freerun check-env says more")
            if time.monotonic() > deadline:
                raise UserError(
                    f"no step of {factory.env} has ended after {START_SECONDS:g} s: it is too slow to bench"
                )
            time.sleep(POLL_SECONDS)
        yield counts, workers
    finally:
        processes.stop(workers, 0.0)  # they hold nothing that needs time to close


def _step_forever(factory: GymnasiumFactory, shared: Any, worker: int) -> None:
    processes.enter_worker()
    # Each worker is the only writer of its two counters, so they need no lock.
    counts = np.frombuffer(shared, np.int64)[2 * worker : 2 * worker + 2]
    env: gymnasium.Env[Any, Any] = factory.make_one().env
    env.action_space.seed(worker)
    # An endless cycle without a branch in the loop below, which is what the limit measures.
    draw: Callable[[], Any] = itertools.cycle([env.action_space.sample() for _ in range(NUM_ACTIONS)]).__next__
    if factory.mask_source is not None:  # then an action must be drawn at each step
        env = masked = RandomAllowedActions(env, factory.mask_source)
        draw = functools.partial(masked.draw, env.action_space)
    for episode in itertools.count():
        env.reset(seed=worker + 1_000_003 * episode)  # a prime, so that no two workers share a seed
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(draw())
            ended = terminated or truncated
            counts[0] += 1
        counts[1] += 1
