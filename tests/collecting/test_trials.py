"""Evaluation during a run: when it is due, with which weights, and on which episodes."""

from __future__ import annotations

import numpy as np
import pytest

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.rollouts.evaluation_episodes import GreedyPolicy, HeldOutEpisodes, PeriodicEvaluation, play
from freerun.core import HeldOutSeed, Purpose


def make_policy(factory: GymnasiumFactory) -> MLPActor:
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    policy.load(np.random.default_rng(0).normal(size=policy.weights.size).astype(np.float32))
    return policy


def test_an_evaluation_is_due_at_fixed_steps_and_uses_the_newest_weights() -> None:
    factory = GymnasiumFactory("CartPole-v1")
    policy = make_policy(factory)
    evaluation = PeriodicEvaluation(HeldOutEpisodes(factory.make(1), seed=3, num_episodes=4), policy, every_steps=100)
    assert evaluation.read(99) == {}
    first = evaluation.read(130)
    assert first["eval_step"] == 130
    assert evaluation.read(199) == first
    policy.load(-policy.weights)
    second = evaluation.read(200)
    assert second["eval_step"] == 200
    policy.load(-policy.weights)
    assert evaluation.read(370)["eval_return"] == first["eval_return"]  # the same weights on the same episodes
    evaluation.close()


def test_it_plays_with_the_most_likely_actions() -> None:
    factory = GymnasiumFactory("CartPole-v1")
    policy = make_policy(factory)
    evaluation = PeriodicEvaluation(HeldOutEpisodes(factory.make(1), seed=3, num_episodes=3), policy, every_steps=1)
    seed = HeldOutSeed(3, Purpose.VALIDATION)
    returns = [float(segment.reward.sum()) for segment in play(factory.make(1), GreedyPolicy(policy), seed, 3)]
    assert evaluation.read(1)["eval_return"] == pytest.approx(np.mean(returns))
    evaluation.close()
