"""Layer normalisation in the policy of fast SAC: in numpy, in torch, and in what a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freerun
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor, normalized_relu
from freerun.algorithms.policies.networks import NormalizedReLU, mlp_from
from freerun.core import UserError
from freerun.run.evaluation import evaluate

SPEC = ActorSpec(3, (8, 8), "normalized-relu", (), 2, normalize_obs=False)
SMALL: dict[str, Any] = {"algo": "fastsac", "actor_layer_norm": True, "hidden_sizes": (16,), "quiet": True}
SMALL |= {"updates_per_step": 0.1, "learning_starts": 60, "batch_size": 32}


def test_numbers_by_hand() -> None:
    """(1, 3): mean 2, variance 1, so (−1, 1) / sqrt(1 + 1e-5). (4, 4): variance 0, so 0 / sqrt(1e-5)."""
    x = np.array([[1, 3], [4, 4]], np.float32)
    normalized_relu(x, out=x)
    np.testing.assert_allclose(x, [[0, 1 / np.sqrt(1.00001)], [0, 0]], rtol=1e-6)
    row = np.array([1, 3], np.float32)
    normalized_relu(row, out=row)
    np.testing.assert_array_equal(row, x[0])


def test_numpy_and_torch_agree() -> None:
    x = np.random.default_rng(0).normal(3, 5, (20, 7)).astype(np.float32)
    theirs = NormalizedReLU()(torch.from_numpy(x)).numpy()
    normalized_relu(x, out=x)
    np.testing.assert_allclose(x, theirs, atol=1e-5)
    actor = MLPActor(SPEC, scalar_actions=False)
    actor.load(np.random.default_rng(1).normal(size=actor.weights.size).astype(np.float32))
    obs = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
    network = mlp_from(SPEC, actor.arrays)
    mean = network(torch.from_numpy(obs)).detach().numpy()
    np.testing.assert_allclose(actor.act(obs, None).action, mean, atol=1e-4)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("freerun/RoughDrone-v1", {"mode": "batch", "num_envs": 8, "num_steps_per_env": 5}),
        ("Pendulum-v1", {"mode": "freerun", "num_workers": 2, "max_episode_steps": 50}),
    ],
)
def test_it_learns_and_its_policy_can_be_loaded(env: str, options: dict[str, Any], run_dir: Path) -> None:
    result = freerun.train(env, **SMALL, **options, total_steps=400, run_dir=run_dir)
    assert result.policy.actor.describe()["activation"] == "normalized-relu"
    assert np.isfinite(result.policy.weights).all()
    again = freerun.resume(run_dir, total_steps=600)
    loaded = freerun.load_policy(run_dir)
    np.testing.assert_array_equal(loaded.weights, again.policy.weights)
    assert evaluate(run_dir, 1).lengths[0] > 0


def test_another_activation_is_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match="--actor-layer-norm has a ReLU behind it"):
        freerun.train("Pendulum-v1", **SMALL, activation="tanh", run_dir=run_dir)
