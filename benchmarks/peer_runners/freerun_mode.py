"""freerun's own mode: PPO trains all the while, or (`--collect-only`) the policy acts and nothing is learned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import measuring
import torch
from workloads import WORKLOADS, Workload

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.modes.freerun import Freerun, FreerunConfig
from freerun.core import CollectorSettings
from freerun.settings import registry
from freerun.telemetry.ledger import Ledger
from freerun.transport import processes

COLLECT_ONLY = "--collect-only" in sys.argv
if COLLECT_ONLY:
    sys.argv.remove("--collect-only")


@dataclass(frozen=True)
class Settings:
    """How freerun is set up for a workload."""

    mode: FreerunConfig
    learning: PPOConfig


def settings(name: str) -> Settings:
    """An update learns from as many steps, whatever the workload: 10,000 or, in whole segments, a little less."""
    workload = WORKLOADS[name]
    num_envs = workload.batched_envs_per_worker
    num_lanes = workload.num_workers * num_envs
    # Slow and uneven steps: short segments, so that an update never waits long for the slowest.
    segment_steps = 25 if name == "straggler" else 10_000 // num_lanes
    steps_per_update = 10_000 // (segment_steps * num_lanes) * segment_steps * num_lanes
    learning = PPOConfig(steps_per_update=steps_per_update, num_epochs=4, minibatch_size=2000)
    return Settings(FreerunConfig(num_envs, segment_steps), learning)


@contextmanager
def collecting(workload: Workload) -> Iterator[measuring.Advance]:
    name = next(name for name, known in WORKLOADS.items() if known == workload)
    chosen = settings(name)
    torch.set_num_threads(1)
    processes.preload([*registry.WORKER_MODULES, "freerun_envs.straggler"])
    factory = GymnasiumFactory(workload.env_id)
    algorithm = PPO(factory.spec, chosen.learning, seed=0, device="cpu", deterministic=False)
    ledger = Ledger()
    collector = Freerun(
        factory, algorithm.policy, CollectorSettings(workload.num_workers, max_lag=1, seed=0), chosen.mode
    )
    collector.publish(algorithm.policy.weights, 0)

    demand = algorithm.demand()

    def advance() -> tuple[int, int]:
        """One turn of `training.train`, which this mirrors."""
        steps, episodes = ledger.steps, ledger.episodes
        segments = collector.collect(demand)
        ledger.account(segments)
        if not COLLECT_ONLY:
            algorithm.observe(segments)
            algorithm.update(ledger.version, progress=0.0)
        ledger.finish_update()
        collector.publish(algorithm.policy.weights, ledger.version)
        return ledger.steps - steps, ledger.episodes - episodes

    try:
        yield advance
    finally:
        collector.close()


if __name__ == "__main__":
    measuring.run(collecting, __doc__)
