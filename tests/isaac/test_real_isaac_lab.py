"""The adapter on the real Isaac Lab 3: Newton on the CPU, without Isaac Sim. `make test-isaac` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

from freerun.adapters import isaac_launch
from freerun.adapters.isaac_lab import IsaacLabEnv, make, make_here
from freerun.adapters.isaac_process import IsaacLabProcess
from freerun.core import UserError

if not isaac_launch.is_installed():
    pytest.skip("Isaac Lab is not installed: make test-isaac", allow_module_level=True)

TASK = "Isaac-Cartpole-Direct"
NUM_ENVS = 64
EPISODE_STEPS = 300
EDGE = 3.0
"""Metres from the middle at which an episode ends; the next begins within one metre of it."""


@pytest.fixture(scope="module")
def env() -> Iterator[IsaacLabEnv]:
    """One for all tests: there can be no other in this process."""
    made = make_here(TASK, NUM_ENVS, "cpu", seed=1)
    yield made
    made.close()


def test_what_it_says_of_itself(env: IsaacLabEnv) -> None:
    assert (env.num_envs, env.device) == (NUM_ENVS, torch.device("cpu"))
    assert env.spec.observation_space.shape == (4,)
    assert isinstance(env.spec.action_space, spaces.Box)
    assert env.spec.action_space.shape == (1,)
    assert env.spec.reports_final_obs


def test_every_step_is_true(env: IsaacLabEnv) -> None:
    """Pushed about at random, some carts leave the track and the others time out."""
    generator = torch.Generator().manual_seed(0)
    obs = env.reset()
    length = torch.zeros(NUM_ENVS, dtype=torch.int64)
    num_terminated = num_truncated = 0
    env.metrics()
    before: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for _ in range(EPISODE_STEPS + 50):
        step = env.step(3.0 * torch.randn(NUM_ENVS, 1, generator=generator))
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True)), "a step overwrote the last one's"
        before, kept = list(step), [part.clone() for part in step]
        length += 1
        ended = step.terminated | step.truncated
        assert not (step.terminated & step.truncated).any()
        assert torch.equal(step.terminated, step.final_obs[:, 0].abs() > EDGE)
        assert torch.equal(step.truncated, (length >= EPISODE_STEPS) & ~step.terminated)
        assert torch.equal(step.final_obs[~ended], step.obs[~ended])
        assert (step.obs[:, 0].abs() <= EDGE).all(), "what to act on next lies within an episode"
        # The cart moves by its speed: a final observation continues from the one before.
        moved = step.final_obs[:, 0] - obs[:, 0]
        assert (moved.abs() < 0.5).all()
        assert ("Metrics/success_rate" in env.metrics()) == bool(ended.any())
        num_terminated += int(step.terminated.sum())
        num_truncated += int(step.truncated.sum())
        length.masked_fill_(ended, 0)
        obs = step.obs.clone()
    assert num_terminated > 0
    assert num_truncated > 0


def test_one_simulation_per_process_and_the_next_in_another(env: IsaacLabEnv) -> None:
    with pytest.raises(UserError, match="once per process"):
        make_here(TASK, NUM_ENVS, "cpu", seed=1)
    other = make(TASK, 8, "cpu", seed=2)
    assert isinstance(other, IsaacLabProcess)
    obs = other.reset().clone()
    assert obs.shape == (8, 4)
    for _ in range(10):
        step = other.step(torch.zeros(8, 1))
        assert (step.final_obs[:, 0] - obs[:, 0]).abs().max() < 0.5
        assert not torch.equal(step.obs, obs)
        obs = step.obs.clone()
    other.close()
    assert other.process.exitcode == 0


def freerun_train(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "freerun", "train", *words], capture_output=True, text=True, timeout=900, check=False
    )


def test_a_task_that_does_not_exist_lists_close_ones() -> None:
    run = freerun_train("--task", "Isaac-Cartpole-Direct-v0", "--mode", "batch", "--device", "cpu")
    assert run.returncode == 2, run.stderr
    assert "Isaac-Cartpole-Direct" in run.stderr.splitlines()[-1]


def test_ppo_in_batch_mode_balances_the_pole(tmp_path: Path) -> None:
    """Of a highest possible 5; RSL-RL's own settings for the task, as far as freerun has them."""
    run = freerun_train(
        *("--task", TASK, "--headless", "--mode", "batch", "--device", "cpu", "--run-dir", str(tmp_path / "run")),
        *("--num-envs", "1024", "--num-steps-per-env", "16", "--total-steps", "1500000"),
        *("--num-epochs", "5", "--minibatch-size", "4096", "--learning-rate", "1e-3", "--hidden-sizes", "32", "32"),
        *("--entropy-coef", "0.005", "--value-coef", "1.0", "--max-grad-norm", "1.0"),
    )
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(record["return_mean"] or 0.0 for record in records)
    print("steps, return:", [(record["step"], record["return_mean"]) for record in records[::10]])
    assert best >= 4.9
    assert any("Metrics/success_rate" in record for record in records)
