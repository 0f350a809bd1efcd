"""Gymnasium's AsyncVectorEnv: a process per environment, shared memory; the policy acts on batches in the parent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import measuring
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from mlp_policy import MlpPolicy
from workloads import Workload, env_makers


@contextmanager
def collecting(
    workload: Workload, vector: type[AsyncVectorEnv] | type[SyncVectorEnv] = AsyncVectorEnv
) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    # With SAME_STEP every row is a step of an environment: by default, the row after an episode is a reset.
    envs = vector(env_makers(workload.env_id, workload.num_envs), autoreset_mode=AutoresetMode.SAME_STEP)
    policy = MlpPolicy(envs.single_observation_space, envs.single_action_space)
    obs, _ = envs.reset(seed=0)

    def advance() -> tuple[int, int]:
        nonlocal obs
        actions, _ = policy.act(obs)
        obs, _, terminations, truncations, _ = envs.step(actions)
        return envs.num_envs, int((terminations | truncations).sum())

    yield advance
    envs.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
