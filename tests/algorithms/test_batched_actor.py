"""A policy whose network runs on the learner's device, for all environments at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import freerun
from freerun.adapters.space_adapter import SpaceAdapter
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.core import BatchablePolicy, Policy, UserError

CASES: dict[str, tuple[spaces.Space[Any], Any, bool, dict[str, Any]]] = {
    "numbers": (spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32), False, {}),
    "masked numbers": (spaces.Box(-9, 9, (3,), np.float32), spaces.MultiDiscrete([3, 2]), True, {}),
    "pixels": (spaces.Box(0, 255, (40, 40, 3), np.uint8), spaces.Discrete(4), True, {}),
    "pixels and numbers": (
        spaces.Dict(a=spaces.Box(0, 255, (9, 9, 1), np.uint8), b=spaces.Box(-9, 9, (2,), np.float32)),
        spaces.Discrete(3),
        False,
        {},
    ),
    "impala": (spaces.Box(0, 255, (1, 12, 12), np.uint8), spaces.Discrete(3), False, {"network": "impala"}),
    "own": (spaces.Box(0, 255, (1, 12, 12), np.uint8), spaces.Discrete(3), False, {"network": "toy_networks:cnn"}),
}


def batched(policy: Policy) -> Policy:
    assert isinstance(policy, BatchablePolicy)
    return policy.batched_on("cpu")


@pytest.mark.parametrize("case", CASES)
def test_it_chooses_what_the_policy_of_workers_chooses(case: str) -> None:
    space, actions, has_mask, settings = CASES[case]
    adapter = SpaceAdapter(space, actions, has_mask=has_mask)
    policy = PPO(adapter.spec, PPOConfig(**settings), seed=1, device="cpu", deterministic=False).policy
    acting = batched(policy)
    # It follows the weights that it is given, and not those that it was made with.
    rng = np.random.default_rng(0)
    weights = policy.weights.copy()
    weights[-200:] += rng.normal(0, 0.3, 200)  # those of the last layers
    acting.load(weights)
    space.seed(2)
    size = sum(actions.nvec) if isinstance(actions, spaces.MultiDiscrete) else getattr(actions, "n", 0)
    mask = (np.arange(size) % 2).astype(np.uint8) if has_mask else None
    rows = np.stack([adapter.read(space.sample(), mask) for _ in range(6)])
    noise = policy.draw(rng, len(rows))
    found, expected = acting.act(rows, noise), policy.act(rows, noise)
    np.testing.assert_allclose(found.head, expected.head, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.action, expected.action, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(acting.weights, policy.weights)
    assert acting.describe() == policy.describe()


def test_a_squashed_policy_can_be_batched_too() -> None:
    adapter = SpaceAdapter(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32))
    policy = SAC(adapter.spec, SACConfig(), seed=1, device="cpu", deterministic=False).policy
    rows, noise = np.ones((4, 3), np.float32), policy.draw(np.random.default_rng(0), 4)
    np.testing.assert_allclose(batched(policy).act(rows, noise).action, policy.act(rows, noise).action, atol=1e-5)


def test_sync_acts_on_the_device_of_the_learner(run_dir: Path) -> None:
    settings: dict[str, Any] = {"env_args": {"size": 8}, "steps_per_update": 256, "num_epochs": 4, "quiet": True}
    result = freerun.train(
        "image_envs:FallingBall",
        mode="sync",
        act_on_device=True,
        num_workers=2,
        total_steps=6000,
        learning_rate=2e-3,
        run_dir=run_dir,
        **settings,
    )
    assert np.mean(freerun.evaluate(result.policy, episodes=50).returns) > 0.4, "-0.25 is what standing still gets"


def test_it_is_refused_where_bits_must_not_depend_on_the_batch(run_dir: Path) -> None:
    with pytest.raises(UserError, match="leave --act-on-device out"):
        freerun.train("CartPole-v1", mode="sync", act_on_device=True, deterministic=True, run_dir=run_dir, quiet=True)


def test_tensors_have_their_policy_on_their_device_anyway(run_dir: Path) -> None:
    with pytest.raises(UserError, match="is on their device: leave --act-on-device out"):
        freerun.train("freerun/RoughDrone-v0", mode="sync", act_on_device=True, num_envs=4, run_dir=run_dir, quiet=True)
