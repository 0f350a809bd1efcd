"""PufferLib's multiprocessing backend: busy workers with shared memory. A batch is whoever has finished first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import measuring
import numpy as np
import pufferlib.emulation  # type: ignore[import-not-found]
import pufferlib.vector  # type: ignore[import-not-found]
import torch
from mlp_policy import MlpPolicy
from workloads import Workload, make_env


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    num_envs, num_workers = workload.num_envs, workload.num_workers
    envs = pufferlib.vector.make(
        partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=partial(make_env, workload.env_id)),
        backend=pufferlib.vector.Multiprocessing,
        num_envs=num_envs,
        num_workers=num_workers,
        # While the policy acts on the half that is ready, the others step.
        batch_size=num_envs // 2,
        zero_copy=False,  # a batch is whoever was first, not the next ones in a fixed order
        overwork=True,  # it refuses more workers than cores otherwise
    )
    policy = MlpPolicy(envs.single_observation_space, envs.single_action_space)
    envs.async_reset(0)

    def advance() -> tuple[int, int]:
        obs, _, terminations, truncations, *_ = envs.recv()
        actions, _ = policy.act(obs)
        envs.send(actions.astype(envs.single_action_space.dtype))
        ended = np.asarray(terminations, bool) | np.asarray(truncations, bool)
        # An environment resets by itself in the step after an episode, so the row that follows an end is no step.
        return len(obs) - int(ended.sum()), int(ended.sum())

    yield advance
    envs.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
