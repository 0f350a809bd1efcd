"""Tianshou's Collector on its ShmemVectorEnv, a process per environment, with the policy of its PPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import measuring
import torch
from gymnasium import spaces
from tianshou.algorithm.modelfree.reinforce import (  # type: ignore[import-not-found]
    DiscreteActorPolicy,
    ProbabilisticActorPolicy,
)
from tianshou.data import Collector, VectorReplayBuffer  # type: ignore[import-not-found]
from tianshou.env import ShmemVectorEnv  # type: ignore[import-not-found]
from tianshou.utils.net.common import Net  # type: ignore[import-not-found]
from tianshou.utils.net.continuous import ContinuousActorProbabilistic  # type: ignore[import-not-found]
from tianshou.utils.net.discrete import DiscreteActor  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from workloads import Workload, env_makers, make_env


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    envs = ShmemVectorEnv(env_makers(workload.env_id, workload.num_envs))
    num_steps = workload.hand_over * workload.num_envs
    collector = Collector(make_policy(workload.env_id), envs, VectorReplayBuffer(num_steps, workload.num_envs))
    collector.reset()

    def advance() -> tuple[int, int]:
        collector.reset_buffer()
        stats = collector.collect(n_step=num_steps)
        return stats.n_collected_steps, stats.n_collected_episodes

    yield advance
    envs.close()


def make_policy(env_id: str) -> ProbabilisticActorPolicy:
    env = make_env(env_id)
    space = env.action_space
    net = Net(state_shape=env.observation_space.shape, hidden_sizes=[64, 64], activation=nn.Tanh)
    if isinstance(space, spaces.Discrete):
        actor = DiscreteActor(preprocess_net=net, action_shape=[space.n], softmax_output=False)
        return DiscreteActorPolicy(actor=actor, action_space=space)
    actor = ContinuousActorProbabilistic(preprocess_net=net, action_shape=space.shape, unbounded=True)
    return ProbabilisticActorPolicy(actor=actor, dist_fn=normal, action_space=space)


def normal(mean_and_std: tuple[Tensor, Tensor]) -> Distribution:
    return Independent(Normal(*mean_and_std), 1)


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
