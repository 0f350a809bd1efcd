"""Stable-Baselines3's SubprocVecEnv, with the rollout collection and the policy of its PPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import measuring
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from workloads import Workload, env_makers


class EpisodeCounter(BaseCallback):
    num_episodes = 0

    def _on_step(self) -> bool:
        self.num_episodes += int(self.locals["dones"].sum())
        return True


# SB3's default start method imports torch in every worker: more memory than this benchmark may take with 100 of them.
FORKED = partial(SubprocVecEnv, start_method="fork")


@contextmanager
def collecting(
    workload: Workload, vector: type[DummyVecEnv] | partial[SubprocVecEnv] = FORKED
) -> Iterator[measuring.Advance]:
    torch.set_num_threads(1)
    envs = vector(env_makers(workload.env_id, workload.num_envs))
    model = PPO("MlpPolicy", envs, n_steps=workload.hand_over, device="cpu")
    _, callback = model._setup_learn(total_timesteps=2**31, callback=(counter := EpisodeCounter()))

    def advance() -> tuple[int, int]:
        num_episodes = counter.num_episodes
        model.collect_rollouts(envs, callback, model.rollout_buffer, workload.hand_over)
        return workload.hand_over * envs.num_envs, counter.num_episodes - num_episodes

    yield advance
    envs.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
