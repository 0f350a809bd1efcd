"""freerun's own mode without its learner: the policy acts, and nothing is learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import measuring
import torch
from workloads import Workload

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.modes.freerun import Freerun, FreerunConfig
from freerun.core import CollectorSettings
from freerun.settings import registry
from freerun.telemetry.ledger import Ledger
from freerun.transport import processes


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    flags = workload.freerun_flags
    torch.set_num_threads(1)
    processes.preload([*registry.WORKER_MODULES, "freerun_envs.straggler"])
    factory = GymnasiumFactory(workload.env_id)
    learning = PPOConfig(steps_per_update=flags["steps-per-update"])
    algorithm = PPO(factory.spec, learning, seed=0, device="cpu", deterministic=False)
    ledger = Ledger()
    collector = Freerun(
        factory,
        algorithm.policy,
        CollectorSettings(flags["num-workers"], max_lag=1, seed=0),
        FreerunConfig(flags["envs-per-worker"], flags["segment-steps"]),
    )
    collector.publish(algorithm.policy.weights, 0)
    demand = algorithm.demand()

    def advance() -> tuple[int, int]:
        """One turn of `training.train`, which this mirrors, without the update."""
        steps, episodes = ledger.steps, ledger.episodes
        ledger.account(collector.collect(demand))
        ledger.finish_update()
        collector.publish(algorithm.policy.weights, ledger.version)
        return ledger.steps - steps, ledger.episodes - episodes

    try:
        yield advance
    finally:
        collector.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
