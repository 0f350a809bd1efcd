"""The work that every system is measured on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

# The peers' own virtual environments do not have freerun installed, and Straggler needs nothing but Gymnasium.
SOURCE = Path(__file__).parents[2] / "src"
if str(SOURCE) not in sys.path:
    sys.path.append(str(SOURCE))


@dataclass(frozen=True)
class Workload:
    env_id: str
    num_workers: int
    """Processes that step environments; systems with a process per environment have `num_envs` of them."""
    envs_per_worker: int
    batched_envs_per_worker: int
    """For systems that are usually run with several environments per process."""
    episodes_per_round: int
    """For systems that collect whole episodes: what they would learn from at once."""

    @property
    def num_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    @property
    def num_batched_envs(self) -> int:
        return self.num_workers * self.batched_envs_per_worker


WORKLOADS = {
    "straggler": Workload("freerun/Straggler-v0", 100, 1, 1, episodes_per_round=100),
    "halfcheetah-2": Workload("HalfCheetah-v5", 2, 1, 4, episodes_per_round=4),
    "halfcheetah-8": Workload("HalfCheetah-v5", 8, 1, 1, episodes_per_round=8),
    "cartpole": Workload("CartPole-v1", 2, 32, 32, episodes_per_round=200),
}


def make_env(env_id: str, *_: Any, **__: Any) -> gymnasium.Env[Any, Any]:
    """Build an environment, also in a fresh worker process; peers pass settings of their own, which it ignores."""
    import freerun.adapters.catalog  # noqa: F401 - registers Straggler

    return gymnasium.make(env_id, disable_env_checker=True)


def env_makers(env_id: str, num_envs: int) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    return [partial(make_env, env_id)] * num_envs
