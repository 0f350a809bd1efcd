"""TorchRL's asynchronous collector: processes that each step their environments with a copy of the policy.

With 100 workers its ParallelEnv, where the policy acts on one batch, is five times as fast, and is used instead.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import measuring
import torch
from gymnasium import spaces
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector, MultiAsyncCollector  # type: ignore[import-not-found]
from torchrl.envs import (  # type: ignore[import-not-found]
    DoubleToFloat,
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import IndependentNormal, ProbabilisticActor  # type: ignore[import-not-found]
from workloads import Workload, make_env

MAX_COLLECTORS = 8


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    collector = make_collector(workload)
    batches = iter(collector)

    def advance() -> tuple[int, int]:
        batch = next(batches)
        return batch.numel(), int(batch["next", "done"].sum())

    yield advance
    collector.shutdown()
    # After a shutdown, TorchRL 0.14.1 still keeps the interpreter from exiting, for minutes.
    atexit.register(os._exit, 0)


def make_collector(workload: Workload) -> Any:
    policy, envs_per_worker = make_policy(workload.env_id), workload.envs_per_worker
    if workload.num_workers > MAX_COLLECTORS:
        # Forked, because 100 processes that import torch take more memory than this benchmark may.
        return Collector(
            ParallelEnv(workload.num_envs, partial(make_envs, workload.env_id, 1), mp_start_method="fork"),
            policy,
            frames_per_batch=workload.hand_over * workload.num_envs,
            total_frames=-1,
            device="cpu",
        )
    return MultiAsyncCollector(
        [partial(make_envs, workload.env_id, envs_per_worker)] * workload.num_workers,
        policy,
        frames_per_batch=workload.hand_over * envs_per_worker,
        total_frames=-1,
        device="cpu",
    )


def make_envs(env_id: str, num_envs: int) -> Any:
    make_one = partial(make_wrapped, env_id)
    envs = make_one() if num_envs == 1 else SerialEnv(num_envs, make_one)
    is_double = envs.observation_spec["observation"].dtype == torch.float64
    return TransformedEnv(envs, DoubleToFloat(in_keys=["observation"])) if is_double else envs


def make_wrapped(env_id: str) -> GymWrapper:
    return GymWrapper(make_env(env_id), categorical_action_encoding=True)


def make_policy(env_id: str) -> ProbabilisticActor:
    env, spec = make_env(env_id), make_wrapped(env_id).action_spec
    num_inputs = spaces.flatdim(env.observation_space)
    is_discrete = isinstance(env.action_space, spaces.Discrete)
    num_outputs = spaces.flatdim(env.action_space) * (1 if is_discrete else 2)
    layers = [nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
    if not is_discrete:
        layers.append(NormalParamExtractor())
    parameters = ["logits"] if is_discrete else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(*layers), in_keys=["observation"], out_keys=parameters),
        spec=spec,
        in_keys=parameters,
        distribution_class=Categorical if is_discrete else IndependentNormal,
        return_log_prob=True,
    )


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
