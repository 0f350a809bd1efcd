"""The T-maze: a policy with a memory solves it, and none without one can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import freerun
from freerun.core import UserError
from freerun_envs.t_maze import GO_ON, TURN_LEFT, TURN_RIGHT, TMaze

LEARNING: dict[str, Any] = {"env_args": {"length": 5}, "mode": "sequential", "total_steps": 30_000, "seed": 3}


def test_the_signal_is_shown_once_and_says_which_way_to_turn() -> None:
    env = TMaze(length=3)
    signals = set()
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        signal = obs[0]
        signals.add(float(signal))
        seen = [env.step(np.int64(GO_ON))[0].tolist() for _ in range(3)]
        assert seen == [[0, 0], [0, 0], [0, 1]]
        turn = TURN_RIGHT if seed % 2 else TURN_LEFT
        _, reward, terminated, truncated, _ = env.step(np.int64(turn))
        assert reward == (1 if (turn == TURN_RIGHT) == (signal > 0) else -1)
        assert (terminated, truncated) == (True, False)
    assert signals == {-1.0, 1.0}


def test_wasted_steps_cost_and_an_episode_ends_by_itself() -> None:
    env = TMaze(length=1)
    env.reset(seed=0)
    wasted = env.step(np.int64(TURN_LEFT))
    assert wasted[1:4] == (-0.1, False, False)
    assert wasted[0][1] == 0
    assert env.step(np.int64(GO_ON))[1] == 0
    assert env.step(np.int64(GO_ON))[1:4] == (-0.1, False, False)
    assert env.step(np.int64(GO_ON))[1:4] == (-0.1, False, True)
    with pytest.raises(UserError, match="length of at least 1"):
        TMaze(length=0)


def test_gymnasium_finds_nothing_wrong() -> None:
    check_env(gymnasium.make("freerun/TMaze-v0").unwrapped)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_a_memory_solves_it(memory: str, run_dir: Path) -> None:
    result = freerun.train("freerun/TMaze-v0", memory=memory, run_dir=run_dir, quiet=True, **LEARNING)
    assert freerun.evaluate(result.policy, episodes=100).mean > 0.95
    returns = [json.loads(line)["return_mean"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    solved = next(number for number, value in enumerate(returns) if value > 0.9)
    assert min(returns[solved:]) > 0.8, "it has forgotten what it had learned"


def test_an_mlp_does_not(run_dir: Path) -> None:
    """Its best return is 0 on average: at the junction both kinds of episode look the same."""
    result = freerun.train("freerun/TMaze-v0", run_dir=run_dir, quiet=True, **LEARNING)
    assert abs(freerun.evaluate(result.policy, episodes=100).mean) < 0.35
