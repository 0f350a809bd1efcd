"""Trials during a run: when, with which weights, and on which episodes."""

from __future__ import annotations

import numpy as np
import pytest

from freerun.algorithms.actor import ActorSpec, MLPActor
from freerun.collectors.trials import Greedy, Trials, play
from freerun.envs.gymnasium import GymnasiumFactory


def make_policy(factory: GymnasiumFactory) -> MLPActor:
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    policy.load(np.random.default_rng(0).normal(size=policy.weights.size).astype(np.float32))
    return policy


def test_a_trial_is_due_every_so_many_steps_and_uses_the_newest_weights() -> None:
    factory = GymnasiumFactory("CartPole-v1")
    policy = make_policy(factory)
    trials = Trials(factory.make(1), policy, seed=3, every_steps=100, num_episodes=4)
    assert trials.read(99) == {}
    first = trials.read(130)
    assert first["eval_step"] == 130
    assert trials.read(199) == first
    policy.load(-policy.weights)
    second = trials.read(200)
    assert second["eval_step"] == 200
    policy.load(-policy.weights)
    assert trials.read(370)["eval_return"] == first["eval_return"]  # the same weights on the same episodes
    trials.close()


def test_it_plays_with_the_most_likely_actions() -> None:
    factory = GymnasiumFactory("CartPole-v1")
    policy = make_policy(factory)
    env = factory.make(1)
    trials = Trials(env, policy, seed=3, every_steps=1, num_episodes=3)
    returns = [float(segment.reward.sum()) for segment in play(factory.make(1), Greedy(policy), 1_000_003 + 3, 3)]
    assert trials.read(1)["eval_return"] == pytest.approx(np.mean(returns))
    trials.close()
