"""Sample Factory's asynchronous sampler: rollout workers, shared memory, and one process that acts for all of them."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import measuring
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI  # type: ignore[import-not-found]
from sample_factory.algo.utils.env_info import (  # type: ignore[import-not-found]
    obtain_env_info_in_a_separate_process,
)
from sample_factory.algo.utils.multiprocessing_utils import get_mp_ctx  # type: ignore[import-not-found]
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # type: ignore[import-not-found]
from sample_factory.envs.env_utils import register_env  # type: ignore[import-not-found]
from workloads import Workload, make_env

TRAJECTORIES_PER_ADVANCE = 4


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    logging.getLogger("rl").setLevel(logging.ERROR)
    # The default, spawn, takes 16 GB and two minutes with 100 workers, because each one imports torch.
    get_mp_ctx.mp_ctx = multiprocessing.get_context("fork")
    register_env(workload.env_id, make_env)
    envs_per_worker = workload.envs_per_worker
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"--env={workload.env_id}",
            f"--train_dir={folder}",
            f"--num_workers={workload.num_workers}",
            f"--num_envs_per_worker={envs_per_worker}",
            # Two halves of a worker's environments take turns, so that it steps one while the other's actions come.
            f"--worker_num_splits={2 if envs_per_worker > 1 else 1}",
            f"--rollout={workload.hand_over}",
            f"--batch_size={workload.hand_over * workload.num_envs}",
            "--experiment=peers",
            "--device=cpu",
            "--use_rnn=False",
            "--recurrence=1",
            "--normalize_input=False",
            "--nonlinearity=tanh",
            "--encoder_mlp_layers",
            "64",
            "64",
        ]
        parser, _ = parse_sf_args(settings)
        config = parse_full_cfg(parser, settings)
        sampler = SyncSamplingAPI(config, obtain_env_info_in_a_separate_process(config))
        sampler.start()

        def advance() -> tuple[int, int]:
            num_steps = num_episodes = 0
            for _ in range(TRAJECTORIES_PER_ADVANCE):
                trajectories = sampler.get_trajectories_sync()
                num_steps += trajectories["dones"].numel()
                num_episodes += int(trajectories["dones"].sum())
            return num_steps, num_episodes

        yield advance
        sampler.stop()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
