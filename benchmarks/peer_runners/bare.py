"""The limit of the machine: processes that step environments with random actions, and do nothing else.

With `--ready-actions` the actions are drawn before the measurement and used again and again. On HalfCheetah-v5 drawing
one takes half as long as a step, and on CartPole-v1 as long as one: a policy that is cheaper than `sample()` may exceed
the limit with actions drawn on the way, and comes closest to the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any

import measuring
import numpy as np
from workloads import Workload, make_env

ADVANCE_SECONDS = 0.05
NUM_ACTIONS = 1_000
READY_ACTIONS = "--ready-actions" in sys.argv
if READY_ACTIONS:
    sys.argv.remove("--ready-actions")


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    context = multiprocessing.get_context("fork")
    shared = RawArray("q", 2 * workload.num_workers)
    counts = np.frombuffer(shared, np.int64).reshape(workload.num_workers, 2)
    processes = [
        context.Process(target=work, args=(shared, worker, workload), daemon=True)
        for worker in range(workload.num_workers)
    ]
    for process in processes:
        process.start()
    while not counts[:, 0].all():
        time.sleep(0.001)
    seen = counts.sum(0)

    def advance() -> tuple[int, int]:
        nonlocal seen
        time.sleep(ADVANCE_SECONDS)
        before, seen = seen, counts.sum(0)
        num_steps, num_episodes = seen - before
        return int(num_steps), int(num_episodes)

    yield advance
    for process in processes:
        process.terminate()


def work(shared: Any, worker: int, workload: Workload) -> None:
    counts = np.frombuffer(shared, np.int64)[2 * worker : 2 * worker + 2]
    envs = [make_env(workload.env_id) for _ in range(workload.envs_per_worker)]
    for number, env in enumerate(envs):
        env.reset(seed=worker * workload.envs_per_worker + number)
    envs[0].action_space.seed(worker)
    sample = envs[0].action_space.sample
    ready = itertools.cycle([sample() for _ in range(NUM_ACTIONS)])
    next_action = ready.__next__ if READY_ACTIONS else sample
    while True:
        num_episodes = 0
        for env in envs:
            _, _, terminated, truncated, _ = env.step(next_action())
            if terminated or truncated:
                env.reset()
                num_episodes += 1
        counts += (len(envs), num_episodes)


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
