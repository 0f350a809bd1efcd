"""EnvPool: environments in C++ threads. It steps half of them while the policy acts on the other half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import envpool
import measuring
import torch
from mlp_policy import MlpPolicy
from workloads import Workload


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    if workload.env_id not in envpool.list_all_envs():
        raise measuring.CannotRun(f"EnvPool's environments are compiled in, and {workload.env_id} is not among them.")
    torch.set_num_threads(1)
    envs = envpool.make(
        workload.env_id,
        env_type="gymnasium",
        num_envs=workload.num_envs,
        batch_size=workload.num_envs // 2,
        num_threads=workload.num_workers,
        seed=0,
    )
    policy = MlpPolicy(envs.observation_space, envs.action_space)
    envs.async_reset()

    def advance() -> tuple[int, int]:
        obs, _, terminations, truncations, info = envs.recv()
        actions, _ = policy.act(obs)
        envs.send(actions.astype(envs.action_space.dtype), info["env_id"])
        # The row after an episode is a reset, and no step.
        return int((info["elapsed_step"] > 0).sum()), int((terminations | truncations).sum())

    yield advance
    envs.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
