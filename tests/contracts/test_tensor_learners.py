"""Several learners, each with simulators of its own that are tensors: they exchange over gloo on the CPU."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import psutil
import pytest
from learner_processes import together

import freerun
from freerun.collecting.tensors.tensor_rollout import make_rollouts
from freerun.core import LearnerGroup, SingleLearner, TensorSegment, UserError
from freerun.run.replay_run import replay
from freerun.settings import registry
from freerun.settings.defaults import complete
from freerun_envs.drone_sim import RoughDroneSim

DRONE = "freerun/RoughDrone-v1"
MODES = [name for name, entry in registry.MODES.items() if entry.traits.tensors is not None]
NETWORK: dict[str, Any] = {"hidden_sizes": (8,)}
OFF_POLICY = {**NETWORK, "updates_per_step": 0.2, "learning_starts": 80, "batch_size": 16, "steps_per_update": 80}
MODEL = {"model_hidden_sizes": (8,), "rollouts_per_step": 1.0, "model_updates_per_step": 0.1, "stages": "in-turn"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    # One minibatch: one learner has the rows of both simulators in another order.
    "ppo": {**NETWORK, "num_epochs": 3, "steps_per_update": 80, "minibatch_size": 80, "normalize_obs": True},
    "sac": OFF_POLICY,
    "fastsac": OFF_POLICY,
    "mbpo": {**OFF_POLICY, **MODEL, "steps_per_model_training": 80},
}
NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 10, 4


@functools.cache
def simulated() -> list[list[TensorSegment]]:
    """By update: a segment of each of two simulators."""
    envs = [RoughDroneSim(NUM_ENVS, task="hover", seed=seed, episode_seconds=0.3) for seed in range(2)]
    config = registry.make_config({"env": DRONE, "algo": "sac", **OFF_POLICY}).algorithm
    policy = registry.ALGORITHMS["sac"].load()(envs[0].spec, config, 0, "cpu", False).policy
    rollouts = make_rollouts(envs, policy, 0, NUM_STEPS, "auto")
    for rollout in rollouts:
        rollout.load(policy.weights, 0)
    return [[rollout.collect() for rollout in rollouts] for _ in range(NUM_UPDATES)]


def learn(group: LearnerGroup, algo: str) -> np.ndarray[Any, Any]:
    """The weights after a few updates, of which each learner gets the segments of its own simulator."""
    spec = RoughDroneSim(NUM_ENVS, task="hover").spec
    config = registry.make_config({"env": DRONE, "algo": algo, **ALGORITHMS[algo]}).algorithm
    algorithm = registry.ALGORITHMS[algo].load()(spec, config, 3, "cpu", False, group)
    for version, segments in enumerate(simulated()):
        assert algorithm.demand()
        algorithm.observe(segments[group.index :: group.count])
        assert not algorithm.demand()
        algorithm.update(version, version / NUM_UPDATES)
    weights: np.ndarray[Any, Any] = algorithm.policy.weights.copy()
    return weights


def learn_all(group: LearnerGroup) -> dict[str, np.ndarray[Any, Any]]:
    return {algo: learn(group, algo) for algo in ALGORITHMS}


@functools.cache  # starting the learners takes longer than all they do
def found_by_two() -> list[dict[str, np.ndarray[Any, Any]]]:
    return together(2, learn_all)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_two_learners_learn_what_one_would_from_both_simulators(algo: str) -> None:
    one = learn(SingleLearner(), algo)
    first, second = (found[algo] for found in found_by_two())
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, one, rtol=1e-3, atol=1e-5)


def settings_for(mode: str) -> dict[str, Any]:
    size = {"collection_batch_size": 40} if mode == "continuous" else {"num_steps_per_env": 5}
    return {**NETWORK, **size, "mode": mode, "num_envs": 8, "quiet": True, "env_args": {"episode_seconds": 0.3}}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_servers")
@pytest.mark.parametrize("mode", MODES)
def test_learners_have_simulators_of_their_own_and_the_books_of_all_balance(mode: str, run_dir: Path) -> None:
    options = {**settings_for(mode), "num_learners": 2, "checkpoint_every": "100"}
    summary = freerun.train(DRONE, **options, total_steps=800, run_dir=run_dir).summary
    assert summary["outcome"] == "finished"
    assert summary["env_steps"] >= 800
    ledger = summary["ledger"]
    assert sum(ledger["steps_by_version"].values()) == summary["env_steps"]
    in_books = ledger["trained"] + ledger["dropped"] + ledger["in_flight"] + ledger["handed_over_untrained"]
    assert ledger["started"] == in_books
    lines = [json.loads(line)["tensors"] for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    if mode != "continuous":
        # An update learns from a segment of each learner's simulator: 2 times 8 environments times 5 steps.
        assert all(len(line) == 2 for line in lines)
        assert summary["updates"] == 10
    with pytest.raises(UserError, match="several learners cannot be replayed"):
        replay(run_dir)
    again = freerun.resume(run_dir, num_learners=1, total_steps=1000)
    assert again.summary["env_steps"] >= 1000


def test_the_size_of_an_update_counts_the_simulators_of_all() -> None:
    config = complete(registry.make_config({"env": DRONE, "num_envs": 8, "num_steps_per_env": 5, "num_learners": 3}))
    assert config.algorithm.steps_per_update == 3 * 8 * 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_learner_that_is_killed_ends_the_run_of_simulators(mode: str, run_dir: Path) -> None:
    """The main thread has the simulator, and the learner that waits for the other has a thread of its own."""
    words = ["train", DRONE, "--mode", mode, "--num-envs", "8", "--num-learners", "2", "--total-steps", "100000000"]
    process = preloaded_python.Process(
        ["-m", "freerun", *words, "--run-dir", str(run_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline, metrics = time.monotonic() + 80, run_dir / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    (follower,) = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
    follower.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.wait() == 1
    assert "its process was killed (SIGKILL)" in err
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left
    assert (run_dir / "policy.safetensors").exists()
