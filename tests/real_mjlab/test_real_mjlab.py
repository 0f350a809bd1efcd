"""RSL-RL's adapter on a task of the real mjlab: MuJoCo Warp on the CPU. `make test-mjlab` runs it."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import freerun
from freerun.adapters.mjlab_tasks import make
from freerun.adapters.rsl_rl_env import RslRlEnv
from freerun.core import UserError

if importlib.util.find_spec("mjlab") is None:
    pytest.skip("mjlab is not installed: make test-mjlab", allow_module_level=True)

NAME = "mjlab:Mjlab-Cartpole-Balance"
NUM_ENVS = 8


@pytest.fixture(scope="module")
def env() -> RslRlEnv:
    return make(NAME, NUM_ENVS, "cpu", seed=1)


def test_its_groups_are_found(env: RslRlEnv) -> None:
    assert env.spec.obs_groups is not None
    assert (env.spec.policy_space.shape, env.spec.critic_space.shape) == ((5,), (5,))
    assert env.spec.observation_space.shape == (10,)
    assert env.spec.action_space.shape == (1,)
    assert not env.spec.reports_final_obs


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean Mjlab-Cartpole-Balance"):
        make("mjlab:Mjlab-Cartpole-Balanced", 2, "cpu", seed=1)


def test_a_step_is_finite_and_leaves_the_last_one_alone(env: RslRlEnv) -> None:
    step = env.step(torch.zeros(NUM_ENVS, 1))
    kept = [part.clone() for part in step]
    env.step(torch.ones(NUM_ENVS, 1))
    assert all(torch.equal(part, before) for part, before in zip(step, kept, strict=True))
    assert step.obs.shape == (NUM_ENVS, 10)
    assert bool(step.obs.isfinite().all())
    assert bool(step.reward.isfinite().all())


@pytest.mark.parametrize(("algo", "mode"), [("ppo", "sync"), ("ppo", "batch"), ("sac", "batch")])
def test_it_trains(algo: str, mode: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"env_args": {"clip_actions": 1.0}, "learning_starts": 100} if algo == "sac" else {}
    freerun.train(
        NAME,
        algo=algo,
        mode=mode,
        num_envs=NUM_ENVS,
        num_steps_per_env=16,
        total_steps=4 * 16 * NUM_ENVS,
        hidden_sizes=(16,),
        run_dir=tmp_path / "run",
        quiet=True,
        **limits,
    )
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 4 * 16 * NUM_ENVS
    losses = [value for name, value in records[-1].items() if name.endswith("_loss")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
