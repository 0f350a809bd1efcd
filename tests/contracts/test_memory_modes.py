"""Policies with a memory, whose segments carry what was remembered before them.

`test_policy_kinds.py` takes them through every mode.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.recurrent_networks import RecurrentActorCritic
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.sequences import Sequences
from freerun.algorithms.ppo.training_batch import flatten_segments
from freerun.core import CollectorSettings, Demand
from freerun.run.replay_run import replay
from freerun.settings import registry

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "total_episodes": 24,
    "episodes_per_update": 12,
    "minibatch_size": 64,
    "num_epochs": 2,
    "hidden_sizes": (16,),
    "memory": "gru",
    "memory_size": 8,
    "sequence_steps": 10,
    "normalize_obs": True,
    "deterministic": True,
    "seed": 5,
    "quiet": True,
}
OF_MODE: dict[str, dict[str, Any]] = {
    "continuous": {"num_collectors": 2, "num_envs": 4, "collection_batch_size": 32},
    "batch": {"num_envs": 4, "num_steps_per_env": 16},
    "freerun": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
    "ray": {"num_workers": 2, "envs_per_worker": 2, "segment_steps": 16},
}

THREADS = {**OF_MODE["continuous"], "collector_kind": "thread"}


def test_several_environments_of_a_worker_and_an_lstm(run_dir: Path) -> None:
    """Episodes of one worker that run beside each other keep their memories apart."""
    settings = {**SETTINGS, "memory": "lstm"}
    alone = freerun.train(**settings, mode="sequential", run_dir=run_dir / "alone")
    beside = freerun.train(**settings, mode="freerun", num_workers=2, envs_per_worker=3, run_dir=run_dir / "beside")
    np.testing.assert_array_equal(alone.policy.weights, beside.policy.weights)


@pytest.mark.parametrize(("mode", "own"), [*OF_MODE.items(), ("continuous", THREADS)], ids=str)
def test_the_learner_goes_on_from_the_memory_of_a_segment(mode: str, own: dict[str, Any]) -> None:
    """Log-probabilities that it recomputes from there are those of the worker, in the middle of an episode too."""
    factory = GymnasiumFactory("freerun/TMaze-v0")
    config = PPOConfig(memory="lstm", memory_size=8, hidden_sizes=(8,), normalize_obs=False)
    ppo = PPO(factory.spec, config, 0, "cpu", False)
    assert isinstance(ppo.net, RecurrentActorCritic)
    options = registry.MODES[mode].load_config()(
        **{name: value for name, value in own.items() if name != "num_workers"}
    )
    max_lag = None if registry.MODES[mode].traits.never_waits else 3
    settings = CollectorSettings(options.num_workers or own["num_workers"], max_lag, seed=3)
    with contextlib.closing(registry.MODES[mode].load()(factory, ppo.policy, settings, options)) as collector:
        collector.publish(ppo.policy.weights, 0)
        segments = [segment for _ in range(4) for segment in collector.collect(Demand(steps=64, whole_episodes=False))]
    assert any(segment.memory.any() for segment in segments), "no segment began in the middle of an episode"
    flat = flatten_segments(segments, torch.device("cpu"))
    sequences = Sequences(segments, ppo.net.memory_size, 8, torch.device("cpu"))
    seen, _ = sequences.remember(ppo.net, flat.obs, flat.boundary_next_obs)
    log_prob = ppo.net.log_prob(ppo.net.head(seen), flat.action)
    np.testing.assert_allclose(log_prob.detach().numpy(), flat.log_prob.numpy(), atol=1e-5)


def test_workers_do_without_torch() -> None:
    factory = GymnasiumFactory("toy_envs:WhereAmI")
    policy = PPO(factory.spec, PPOConfig(memory="gru"), 0, "cpu", False).policy
    with contextlib.closing(
        registry.MODES["pipes"].load()(factory, policy, CollectorSettings(2, 0, seed=3))
    ) as collector:
        collector.publish(policy.weights, 0)
        segments = collector.collect(Demand(episodes=4))
    assert float(np.float32(os.getpid())) not in {float(segment.obs[0, 0, 0]) for segment in segments}
    assert not any((segment.obs[..., 1] != 0).any() for segment in segments)


def test_segments_with_lag_are_replayed_bit_for_bit(run_dir: Path) -> None:
    settings = {**SETTINGS, "deterministic": False, "checkpoint_every": "1", "max_lag": 2, "num_workers": 2}
    settings |= {"episodes_per_update": None, "total_episodes": None, "steps_per_update": 128, "total_steps": 1000}
    settings["segment_steps"] = 16
    result = freerun.train(**settings, mode="freerun", run_dir=run_dir)
    assert result.summary["lag_max"] >= 1
    again = replay(run_dir)
    assert again.is_same
    np.testing.assert_array_equal(again.weights, result.policy.weights)


@pytest.mark.parametrize("mode", [name for name, mode in registry.MODES.items() if mode.traits.tensors])
def test_environments_that_are_tensors(mode: str, run_dir: Path) -> None:
    settings: dict[str, Any] = {"env_args": {"task": "hover"}, "num_envs": 8, "quiet": True}
    pieces = {"collection_batch_size": 48} if registry.MODES[mode].traits.never_waits else {"num_steps_per_env": 6}
    settings |= {"memory": "gru", "memory_size": 8, "sequence_steps": 4, "num_epochs": 2, "device": "cpu"}
    result = freerun.train("freerun/RoughDrone-v0", mode=mode, total_steps=480, run_dir=run_dir, **settings, **pieces)
    assert result.summary["env_steps"] >= 480
    assert len(freerun.evaluate(run_dir, episodes=3).returns) == 3
