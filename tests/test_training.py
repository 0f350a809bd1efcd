"""The loop ends with its budget, whatever an algorithm demands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import AnySegment, Demand, Metrics

STEPS = 300


@dataclass(frozen=True)
class GreedyConfig(PPOConfig):
    growth: int = 0
    """How much larger each demand is than the one before."""
    num_updates: int = 0
    """Updates before the demand can no longer be met."""


class Greedy(PPO):
    """PPO whose demand is never met, however much it is given."""

    Config = GreedyConfig
    config: GreedyConfig

    def __init__(self, env: Any, config: GreedyConfig, *more: Any):
        super().__init__(env, config, *more)
        self._num_observed = self._num_updated = 0

    def demand(self) -> Demand:
        if self._num_updated < self.config.num_updates:
            return super().demand()
        return Demand(steps=20 + self.config.growth * self._num_observed)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        super().observe(segments)
        self._num_observed += 1
        # Far past the budget, so that the test fails and does not hang.
        assert self._num_observed < 200, "the loop goes on without end"

    def update(self, version: int, progress: float) -> Metrics:
        self._num_updated += 1
        return super().update(version, progress)


CASES = [(0, 0), (10, 0), (0, 2)]


def train(mode: str, growth: int, num_updates: int, run_dir: Path, **budget: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"growth": growth, "num_updates": num_updates, "steps_per_update": 50, "num_epochs": 1}
    result = freerun.train("toy_envs:OneBit", algo=Greedy, mode=mode, quiet=True, run_dir=run_dir, **budget, **settings)
    summary: dict[str, Any] = result.summary
    assert summary["outcome"] == "finished"
    return summary


@pytest.mark.parametrize("mode", ["sequential", "pipes"])
@pytest.mark.parametrize(("growth", "num_updates"), CASES)
def test_a_demand_that_is_never_met_ends_with_the_steps_of_the_run(
    mode: str, growth: int, num_updates: int, run_dir: Path
) -> None:
    """The last update learns from what there is."""
    summary = train(mode, growth, num_updates, run_dir, total_steps=STEPS)
    assert summary["updates"] == num_updates + 1
    # Episodes have ten steps, and each worker may be one episode too far.
    assert STEPS <= summary["env_steps"] <= STEPS + 10 * summary["num_workers"]


@pytest.mark.parametrize("mode", ["sequential", "pipes"])
@pytest.mark.parametrize(("growth", "num_updates"), CASES)
def test_a_demand_that_is_never_met_ends_with_the_episodes_of_the_run(
    mode: str, growth: int, num_updates: int, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget of episodes does not shorten a demand of steps, which nobody can count in episodes."""
    with caplog.at_level(logging.WARNING, "freerun"):
        summary = train(mode, growth, num_updates, run_dir, total_episodes=STEPS // 10)
    assert summary["updates"] == num_updates
    assert "budget is spent, and the algorithm still demands" in caplog.text


def test_the_last_update_is_as_small_as_the_budget(run_dir: Path) -> None:
    settings: dict[str, Any] = {"steps_per_update": 80, "num_epochs": 1, "quiet": True, "run_dir": run_dir}
    result = freerun.train("toy_envs:OneBit", mode="sequential", total_steps=100, **settings)
    assert (result.summary["updates"], result.summary["env_steps"]) == (2, 100)
