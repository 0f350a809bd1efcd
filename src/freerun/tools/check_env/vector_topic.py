"""The topic of `freerun check-env` that vector environments have: several environments, stepped by one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.vector_envs import OneOfVector
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from freerun.tools.check_env.check_topics import CheckedEnv, Verdict

NUM_ENVS, NUM_STEPS = 4, 250


def check_together(checked: CheckedEnv) -> Iterator[Verdict]:
    """Play several environments of a vector environment as a worker does, by a policy that chooses at random."""
    if not isinstance(checked.env.unwrapped, OneOfVector):
        return
    factory = GymnasiumFactory(checked.name, checked.env_args, wrap=checked.wrap)
    spec = ActorSpec.of(factory.spec, (1,), "tanh")
    # All weights are 0, so all choices that are allowed are equally likely.
    policy = MLPActor(spec, scalar_actions=factory.spec.action_shape == ())
    rollout = Rollout(factory.make(NUM_ENVS), policy, run_seed=0)
    try:
        # What is wrong raises here, as it would in training.
        segment = next(rollout.segments(NUM_STEPS, next_from(itertools.count())))
    finally:
        rollout.close()
    reset = factory.spec.batch_reset
    found = f"{NUM_ENVS} environments made {segment.num_steps:,} steps, {int(segment.ended.sum())} episodes ended"
    advice = "" if reset.seeds_episodes else "; only the first episodes are seeded, so that runs cannot be repeated"
    yield "ok", found, f"{reset.value}{advice}"
