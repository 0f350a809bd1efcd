"""RLlib's remote env runners, sampled in parallel as its PPO does, with a 64-64 tanh RLModule in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import measuring
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env
from workloads import Workload, make_env

MAX_RUNNERS = 8
OBJECT_STORE_BYTES = 200_000_000


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    # A runner imports Ray and torch, so there is no memory for 100: then, a few step subprocesses of their own.
    num_runners = workload.num_workers if workload.num_workers <= MAX_RUNNERS else 2
    envs_per_runner = workload.num_envs // num_runners
    ray.init(
        num_cpus=num_runners + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    register_env("peer", partial(make_env, workload.env_id))
    config = (
        PPOConfig()
        .environment("peer")
        .env_runners(
            num_env_runners=num_runners,
            num_envs_per_env_runner=envs_per_runner,
            gym_env_vectorize_mode="sync" if num_runners == workload.num_workers else "async",
            rollout_fragment_length=workload.hand_over,
        )
        .training(train_batch_size=workload.hand_over * workload.num_envs)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
    )
    algorithm = config.build_algo()

    def advance() -> tuple[int, int]:
        episodes = synchronous_parallel_sample(
            worker_set=algorithm.env_runner_group, max_env_steps=config.train_batch_size, _uses_new_env_runners=True
        )
        return sum(len(episode) for episode in episodes), sum(episode.is_done for episode in episodes)

    yield advance
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
