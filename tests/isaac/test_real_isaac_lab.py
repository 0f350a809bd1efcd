"""The adapter on the real Isaac Lab 3: Newton on the CPU, without Isaac Sim. `make test-isaac` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
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


def freerun_train(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "freerun", "train", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
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


SMALL = ("--num-envs", "32", "--hidden-sizes", "16", "16", "--batch-size", "32", "--total-steps", "2560")
FAST_SAC = ("fastsac", "--updates-per-vector-step", "2")
MBPO = ("mbpo", "--preset", "mbpo-small", "--updates-per-step", "0.1", "--rollouts-per-step", "2")


@pytest.mark.parametrize("mode", ["sync", "batch", "continuous"])
@pytest.mark.parametrize("algorithm", [FAST_SAC, MBPO], ids=lambda words: words[0])
def test_algorithms_that_need_limits_train_within_those_of_clip_actions(
    algorithm: tuple[str, ...], mode: str, tmp_path: Path
) -> None:
    name, *flags = algorithm
    run = freerun_train(
        *("--task", TASK, "--algo", name, *flags, *SMALL, "--env-args", "clip_actions", "1.0"),
        *("--mode", mode, "--device", "cpu", "--display", "lines", "--run-dir", str(tmp_path / "run")),
    )
    assert run.returncode == 0, run.stderr
    assert "gradient steps per step on batches of 32" in run.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["agent_updates"] > 20
    assert last["bad_gradients"] == 0
    assert last["real_data"] == last["step"] >= 2560
    if name == "mbpo":
        assert last["model_data"] > 0
        assert last["model_version"] > 1
    low, high = freerun.load_policy(tmp_path / "run").predict(
        np.array([[0.0, 50.0, 0.0, 50.0], [0.0, -50.0, 0.0, -50.0]], np.float32)
    )
    assert max(abs(low), abs(high)) <= 1.0


def test_without_limits_these_algorithms_name_the_setting(tmp_path: Path) -> None:
    run = freerun_train("--task", TASK, "--algo", "sac", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    assert run.returncode == 2
    assert "--env-args clip_actions 1.0" in run.stderr.splitlines()[-1]


def test_without_the_tasks_files_the_folder_that_should_have_them_is_named(tmp_path: Path) -> None:
    words = ("--task", TASK, "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    run = freerun_train(*words, ISAACSIM_ASSET_ROOT=str(tmp_path))
    assert run.returncode == 2
    assert "set ISAACSIM_ASSET_ROOT to a folder that has them" in run.stderr.splitlines()[-1]
