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
    episodes_per_round: int
    """For systems that collect whole episodes: what they would learn from at once."""
    freerun_segment_steps: int
    hand_over: int = 32
    """Steps of each environment that a system collects before it hands them to its learner, where it can be chosen."""

    @property
    def num_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    @property
    def hand_overs(self) -> tuple[int, ...]:
        """The sizes to choose from: few steps, and together as many as freerun's learner gets for an update."""
        return 32, STEPS_PER_UPDATE // self.num_envs

    @property
    def freerun_flags(self) -> dict[str, int]:
        """The flags of `freerun train`. An update learns from whole segments: 10,000 steps or a few less."""
        segments_of_all = self.freerun_segment_steps * self.num_envs
        return {
            "num-workers": self.num_workers,
            "envs-per-worker": self.envs_per_worker,
            "segment-steps": self.freerun_segment_steps,
            "steps-per-update": STEPS_PER_UPDATE // segments_of_all * segments_of_all,
            "num-epochs": 4,
            "minibatch-size": 2000,
        }


STEPS_PER_UPDATE = 10_000
WORKLOADS = {
    # Slow and uneven steps: short segments, so that an update never waits long for the slowest.
    "straggler": Workload("freerun/Straggler-v0", 100, 1, episodes_per_round=100, freerun_segment_steps=25),
    "halfcheetah": Workload("HalfCheetah-v5", 2, 4, episodes_per_round=8, freerun_segment_steps=1250),
    "cartpole": Workload("CartPole-v1", 2, 32, episodes_per_round=200, freerun_segment_steps=156),
}


def make_env(env_id: str, *_: Any, **__: Any) -> gymnasium.Env[Any, Any]:
    """Build an environment, also in a fresh worker process; peers pass settings of their own, which it ignores."""
    import freerun.adapters.catalog  # noqa: F401 - registers Straggler

    return gymnasium.make(env_id, disable_env_checker=True)


def env_makers(env_id: str, num_envs: int) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    return [partial(make_env, env_id)] * num_envs
