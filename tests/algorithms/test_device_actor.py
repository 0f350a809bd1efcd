"""The policy on the simulator's device does what the workers' policy does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.core import EnvSpec

CPU = torch.device("cpu")
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (5,), np.float32)
BOX = EnvSpec(OBSERVATIONS, spaces.Box(np.array([-2, -1, 0], np.float32), np.array([2, 3, 1], np.float32)))
DISCRETE = EnvSpec(OBSERVATIONS, spaces.Discrete(4))
SEVERAL = EnvSpec(OBSERVATIONS, spaces.MultiDiscrete([3, 5]))
SQUASHED = ActorSpec.squashed(BOX, (8,), "relu")
SPECS = {
    "gaussian": (ActorSpec.of(BOX, (8, 8), "tanh", normalize_obs=True), False),
    "squashed": (SQUASHED, False),
    "deterministic": (dataclasses.replace(SQUASHED, noise_range=(0.1, 0.4)), False),
    "discrete": (ActorSpec.of(DISCRETE, (8,), "tanh"), True),
    "several": (ActorSpec.of(SEVERAL, (8,), "relu"), False),
}


def make_actor(kind: str) -> MLPActor:
    spec, scalar_actions = SPECS[kind]
    actor = MLPActor(spec, scalar_actions)
    # Small weights: at the very edge of their range, squashed actions do not say how they were chosen.
    actor.load(np.random.default_rng(0).normal(0, 0.1, actor.weights.size).astype(np.float32))
    return actor


@pytest.mark.parametrize("kind", SPECS)
def test_log_probabilities_are_those_of_the_workers_policy(kind: str) -> None:
    actor = make_actor(kind)
    on_device = actor.on(CPU, seed=1)
    obs = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
    action, log_prob = on_device.act(obs)
    head = actor.act(obs.numpy(), actor.draw(np.random.default_rng(1), 50)).head
    if kind == "gaussian":  # its head is the noise that led to the action
        mean = actor.act(obs.numpy(), None).action
        head = ((action.numpy() - mean) / np.exp(actor.arrays["log_std"])).astype(np.float32)
    np.testing.assert_allclose(log_prob.numpy(), actor.log_prob(head, action.numpy()), atol=2e-4)


@pytest.mark.parametrize("kind", SPECS)
def test_loaded_weights_are_used_at_once(kind: str) -> None:
    actor = make_actor(kind)
    on_device, obs = actor.on(CPU, seed=1), torch.ones(3, 5)
    newer = actor.weights + 0.3
    on_device.load(newer)
    actor.load(newer)
    np.testing.assert_allclose(on_device.act(obs)[1], actor.on(CPU, seed=1).act(obs)[1])


def test_choices_follow_the_softmax() -> None:
    actor = make_actor("discrete")
    obs = torch.ones(1, 5)
    logits = actor.act(obs.numpy(), actor.draw(np.random.default_rng(0), 1)).head[0]
    chances = np.exp(logits) / np.exp(logits).sum()
    action, _ = actor.on(CPU, seed=0).act(obs.expand(20_000, 5))
    shares = np.bincount(action.numpy(), minlength=4) / 20_000
    np.testing.assert_allclose(shares, chances, atol=5 * 0.5 / math.sqrt(20_000))  # five deviations


def test_squashed_actions_keep_to_their_range() -> None:
    action, _ = make_actor("squashed").on(CPU, seed=0).act(100 * torch.randn(1000, 5))
    assert isinstance(BOX.action_space, spaces.Box)
    assert (action >= torch.from_numpy(BOX.action_space.low)).all()
    assert (action <= torch.from_numpy(BOX.action_space.high)).all()
    assert math.isclose(float(action[:, 1].max()), 3.0, abs_tol=1e-3)
