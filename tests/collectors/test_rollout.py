"""Lanes share a policy call and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from freerun.algorithms.actor import ActorSpec, MLPActor
from freerun.collectors.rollout import FIRST_CAPACITY, NOISE_BLOCK_STEPS, Rollout
from freerun.core import Segment
from freerun.envs.gymnasium import GymnasiumFactory

FIELDS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version", "episode")


def run(env: str, num_lanes: int, num_episodes: int, **env_args: object) -> list[Segment]:
    factory = GymnasiumFactory(env, env_args)
    spec = ActorSpec.of(factory.spec, (8,), "tanh")
    policy = MLPActor(spec, scalar_actions=factory.spec.action_shape == (), batch_invariant=True)
    policy.load(np.random.default_rng(0).normal(size=policy.weights.size).astype(np.float32))
    rollout = Rollout(factory.make(num_lanes), policy, run_seed=7)
    segments = list(rollout.run(iter(range(num_episodes))))
    return sorted(segments, key=lambda segment: int(segment.episode[0, 0]))


@pytest.mark.parametrize("num_lanes", [2, 5])
@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        ("toy_envs:Audit", {"short": 3, "long": 11}),  # lanes end at different times, so some rest at the end
        ("Pendulum-v1", {"max_episode_steps": 20}),
        ("toy_envs:OneBit", {"kind": "multidiscrete"}),
    ],
)
def test_an_episode_is_the_same_in_any_lane(num_lanes: int, env: str, env_args: dict[str, object]) -> None:
    alone, together = run(env, 1, 8, **env_args), run(env, num_lanes, 8, **env_args)
    assert len(alone) == len(together) == 8
    for one, other in zip(alone, together, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_long_episodes_outgrow_every_buffer() -> None:
    length = 3 * max(FIRST_CAPACITY, NOISE_BLOCK_STEPS) + 1
    (segment,) = run("toy_envs:Audit", 1, 1, short=length, long=length)
    assert segment.num_steps == length
    np.testing.assert_array_equal(segment.reward[:, 0], np.arange(1, length + 1))
    np.testing.assert_array_equal(segment.obs[1:], segment.next_obs[:-1])
    assert len(np.unique(segment.action)) == 3, "the noise must not repeat"
