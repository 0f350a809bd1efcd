"""A ProcessPoolExecutor as it is usually written by hand: a task is an episode, and carries the policy.

The learner needs a whole round of episodes before it can send out a newer policy, so rounds end with a wait for the
slowest episode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import gymnasium
import measuring
import numpy as np
import torch
from mlp_policy import MlpPolicy
from numpy.typing import NDArray
from workloads import Workload, make_env


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    env = make_env(workload.env_id)
    policy = MlpPolicy(env.observation_space, env.action_space)
    seeds = iter(range(2**31))
    with ProcessPoolExecutor(workload.num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def advance() -> tuple[int, int]:
            tasks = [
                pool.submit(play, policy, workload.env_id, next(seeds)) for _ in range(workload.episodes_per_round)
            ]
            return sum(len(task.result()["rewards"]) for task in tasks), len(tasks)

        yield advance


@functools.cache
def kept_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """One environment per process, built at its first episode."""
    return make_env(env_id)


def play(policy: MlpPolicy, env_id: str, seed: int) -> dict[str, NDArray[Any]]:
    env = kept_env(env_id)
    torch.manual_seed(seed)
    observations, actions, log_probs, rewards = [], [], [], []
    obs, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action, log_prob = policy.act(obs)
        observations.append(obs)
        actions.append(action)
        log_probs.append(log_prob)
        obs, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    observations.append(obs)
    return {
        "observations": np.array(observations),
        "actions": np.array(actions),
        "log_probs": np.array(log_probs),
        "rewards": np.array(rewards),
    }


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
