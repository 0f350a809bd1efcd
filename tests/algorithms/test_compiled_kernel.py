"""The compiled kernel: where it comes from, and that numpy takes over where it cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.policies.numpy_mlp import layers_of
from freerun.algorithms.ppo.compiled_steps import CompiledForward, CompiledMLP
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig, with_sizes
from freerun.core import EnvSpec, Segment

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
ENV = EnvSpec(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4))
COMPILED, NUMPY = "fast learner, compiled", "fast learner"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no memory of a kernel that was loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_kernel.cache_clear()
    yield tmp_path / "cache" / "freerun"
    compiled_kernel.cache_clear()


def note(config: PPOConfig | None = None) -> str:
    """Who computes gradients, as a run's header says it."""
    found = PPO.traits.learner_note
    assert found is not None
    return found(with_sizes(config or PPOConfig()), "cpu").rpartition(" · ")[2]


def update(num_steps: int = 8, action: int = 1) -> float:
    """The gradient steps of an update, with whatever kernel there is."""
    ppo = PPO(ENV, PPOConfig(minibatch_size=4, num_epochs=1), 0, "cpu", False)
    obs = np.zeros((num_steps, 1, 3), np.float32)
    number, no = np.zeros((num_steps, 1), np.int64), np.zeros((num_steps, 1), np.bool_)
    zero = np.zeros((num_steps, 1), np.float32)
    ppo.observe([Segment(obs, number + action, zero, zero, no, no, obs, number, number, 0.0)])
    return ppo.update(0, 0.0)["num_gradient_steps"]


@NEEDS_COMPILER
def test_the_kernel_is_compiled_once_and_the_header_says_so(cache: Path) -> None:
    assert note() == COMPILED
    assert note(PPOConfig(learner="numpy")) == NUMPY
    assert note(PPOConfig(hidden_sizes=(64, 512))) == NUMPY  # where the products are left to BLAS
    (library,) = cache.iterdir()
    made_at = library.stat().st_mtime_ns
    compiled_kernel.cache_clear()
    assert note() == COMPILED
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [made_at]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "echo"])
def test_without_a_compiler_that_works_numpy_computes(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert compiled_kernel() is None
    assert note() == NUMPY
    assert update() == 2
    assert list(cache.iterdir()) == []


def test_without_any_compiler_numpy_computes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    assert note() == NUMPY


@NEEDS_COMPILER
def test_where_the_cache_cannot_be_written_the_kernel_is_compiled_for_this_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert note() == COMPILED
    assert update() == 2


@NEEDS_COMPILER
def test_a_folder_that_others_may_write_to_is_not_trusted(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert note() == COMPILED
    assert list(cache.iterdir()) == []


@NEEDS_COMPILER
def test_a_library_that_is_damaged_is_compiled_again(cache: Path) -> None:
    script = "from freerun.algorithms.learners.compiled_kernel import compiled_kernel; assert compiled_kernel()"
    subprocess.run([sys.executable, "-c", script], check=True)  # a library that is loaded here would not be read again
    (library,) = cache.iterdir()
    library.write_bytes(b"no library")
    assert note() == COMPILED
    assert library.stat().st_size > 1000


@NEEDS_COMPILER
def test_what_a_killed_compiler_left_behind_is_removed_and_one_that_still_runs_is_left_alone(cache: Path) -> None:
    cache.mkdir(mode=0o700, parents=True)
    abandoned, running = cache / "compiling-abandoned", cache / "compiling-running"
    for folder in (abandoned, running):
        folder.mkdir()
        (folder / "kernel.so").write_bytes(b"half a library")
    an_hour_ago = time.time() - 3600
    os.utime(abandoned, (an_hour_ago, an_hour_ago))
    assert note() == COMPILED
    assert not abandoned.exists()
    assert running.exists()


@NEEDS_COMPILER
def test_processes_that_start_at_once_end_with_one_library(cache: Path) -> None:
    script = "from freerun.algorithms.learners.compiled_kernel import compiled_kernel; assert compiled_kernel()"
    started = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("action", [-1, 4])
def test_an_action_outside_its_space_is_an_error(action: int) -> None:
    if compiled_kernel() is not None:
        with pytest.raises(IndexError, match="none of the choices"):
            update(action=action)


@pytest.mark.parametrize("learner", ["fast", "numpy"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_an_observation_is_counted_at_every_step(value: float, learner: Any) -> None:
    config = PPOConfig(normalize_obs=False, normalize_reward=False, num_epochs=3, learner=learner)
    ppo = PPO(ENV, config, 0, "cpu", False)
    before = ppo.policy.weights.copy()
    obs, one = np.full((8, 1, 3), 0.5, np.float32), np.ones((8, 1), np.float32)
    obs[5, 0, 1] = value
    number, no = np.ones((8, 1), np.int64), np.zeros((8, 1), np.bool_)
    ppo.observe([Segment(obs, number, -one, one, no, no, obs, number, number, 0.0)])
    assert ppo.update(1, 0.0)["bad_gradients"] == 3
    np.testing.assert_array_equal(ppo.policy.weights, before)


@NEEDS_COMPILER
@pytest.mark.parametrize("num_rows", [0, 1, 96, 1927])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_outputs_without_gradients_are_those_of_torch(num_rows: int, activation: Any) -> None:
    """Also where the policy sees only some numbers of a row, the critic others, and a mask stands behind both."""
    kernel = compiled_kernel()
    assert kernel is not None
    spec = ActorSpec(3, (70, 33), activation, (4,), 0, False, critic_obs_size=5, has_mask=True)
    net = ActorCritic(spec)
    flatten_parameters(net)
    rows = torch.randn(num_rows, net.row_size, generator=torch.Generator().manual_seed(0))
    rows[:, -4:] = (rows[:, -4:] > 0).float()
    networks = [CompiledMLP(kernel, layers_of(part), activation) for part in (net.actor, net.critic)]
    with torch.no_grad():
        for got, wanted in zip(
            CompiledForward(net, *networks).head_and_value(rows), net.head_and_value(rows), strict=True
        ):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
