"""Rollouts: environments that are stepped together share a call of the policy and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.rollouts.episode_numbers import NoNextEpisode, next_from
from freerun.collecting.rollouts.rollout import FIRST_CAPACITY, NOISE_ROWS, Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.core import Segment

FIELDS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version", "episode")


def make_single(env: str, **env_args: object) -> SingleEnvRollout:
    factory = GymnasiumFactory(env, env_args)
    return SingleEnvRollout(factory.make_one(), factory.spec, make_policy(factory), run_seed=7)


def make_rollout(env: str, num_envs: int, **env_args: object) -> Rollout:
    factory = GymnasiumFactory(env, env_args)
    return Rollout(factory.make(num_envs), make_policy(factory), run_seed=7)


def make_policy(factory: GymnasiumFactory) -> MLPActor:
    spec = ActorSpec.of(factory.spec, (8,), "tanh", normalize_obs=True)
    policy = MLPActor(spec, scalar_actions=factory.spec.action_shape == (), batch_invariant=True)
    policy.load(np.random.default_rng(0).normal(size=policy.weights.size).astype(np.float32))
    return policy


def run(env: str, num_envs: int, num_episodes: int, **env_args: object) -> list[Segment]:
    rollout = make_rollout(env, num_envs, **env_args)
    segments = [segment.copy() for segment in rollout.episodes(next_from(range(num_episodes)))]
    return sorted(segments, key=lambda segment: int(segment.episode[0, 0]))


@pytest.mark.parametrize("num_envs", [2, 5])
@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        (
            "toy_envs:Audit",
            {"short": 3, "long": 11},
        ),  # some environments idle at the end
        ("Pendulum-v1", {"max_episode_steps": 20}),
        ("toy_envs:OneBit", {"kind": "multidiscrete"}),
    ],
)
def test_an_episode_is_the_same_in_any_environment(num_envs: int, env: str, env_args: dict[str, object]) -> None:
    alone, together = run(env, 1, 8, **env_args), run(env, num_envs, 8, **env_args)
    assert len(alone) == len(together) == 8
    for one, other in zip(alone, together, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize(
    ("env", "env_args"),
    [
        ("toy_envs:Audit", {"short": 3, "long": 300}),
        ("Pendulum-v1", {"max_episode_steps": 20}),
        ("toy_envs:OneBit", {"kind": "multidiscrete"}),
        ("toy_envs:Square", {}),
    ],
)
def test_one_environment_alone_plays_the_same_episodes(env: str, env_args: dict[str, object]) -> None:
    """Whole, and cut into segments."""
    expected = run(env, 1, 8, **env_args)
    for one, other in zip(expected, make_single(env, **env_args).episodes(next_from(range(8))), strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for num_steps in (1, 7, 64):
        rollout, single = make_rollout(env, 1, **env_args), make_single(env, **env_args)
        pairs = zip(
            rollout.segments(num_steps, next_from(itertools.count())),
            single.segments(num_steps, next_from(itertools.count())),
            strict=True,
        )
        for one, other in itertools.islice(pairs, 30):
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("alone", [False, True])
def test_long_episodes_outgrow_every_buffer(alone: bool) -> None:
    length = 3 * max(FIRST_CAPACITY, NOISE_ROWS) + 1
    if alone:
        (segment,) = make_single("toy_envs:Audit", short=length, long=length).episodes(next_from([0]))
    else:
        (segment,) = run("toy_envs:Audit", 1, 1, short=length, long=length)
    assert segment.num_steps == length
    np.testing.assert_array_equal(segment.reward[:, 0], np.arange(1, length + 1))
    np.testing.assert_array_equal(segment.obs[1:], segment.next_obs[:-1])
    assert len(np.unique(segment.action)) == 3, "the noise must not repeat"


def test_environments_that_are_never_all_free_keep_the_buffer_short() -> None:
    """Their episodes end at different times, so the buffer must drop the rows that no running episode needs."""
    rollout = make_rollout("toy_envs:Audit", 3, short=7, long=50)
    lengths = [segment.num_steps for segment in rollout.episodes(next_from(range(200)))]
    assert len(lengths) == 200
    assert sum(lengths) > 3 * 4 * FIRST_CAPACITY
    assert rollout.buffer.capacity == FIRST_CAPACITY


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 16, 100])
def test_segments_laid_end_to_end_are_the_episodes(num_envs: int, num_steps: int) -> None:
    """Wherever the cuts are, the steps are those of whole episodes, and no step's successor is of another episode."""
    rollout = make_rollout("toy_envs:Audit", num_envs, short=7, long=50)
    segments = [
        segment.copy()
        for segment in itertools.islice(rollout.segments(num_steps, next_from(itertools.count())), 400 // num_steps)
    ]
    episodes = {int(segment.episode[0, 0]): segment for segment in run("toy_envs:Audit", 1, 60, short=7, long=50)}
    joined = {name: np.concatenate([getattr(segment, name) for segment in segments]) for name in FIELDS}
    num_whole = 0
    for number in np.unique(joined["episode"]).tolist():
        mine = joined["episode"] == number
        for name in FIELDS:
            expected = getattr(episodes[number], name)[: mine.sum(), 0]
            np.testing.assert_array_equal(joined[name][mine], expected, err_msg=f"{name} of {number}")
        num_whole += bool((joined["terminated"] | joined["truncated"])[mine].any())
    assert num_whole >= 10


def test_new_weights_in_the_middle_of_an_episode_are_stamped_and_leave_older_steps_alone() -> None:
    rollout = make_rollout("Pendulum-v1", 2, max_episode_steps=20)
    before = run("Pendulum-v1", 1, 1, max_episode_steps=20)[0]
    segments = rollout.segments(8, next_from(itertools.count()))
    first = next(segments).copy()
    weights = make_policy(GymnasiumFactory("Pendulum-v1")).weights
    rollout.load(weights + np.float32(0.1), version=3)
    second = next(segments).copy()
    assert (first.version == 0).all()
    assert (second.version == 3).all()
    np.testing.assert_array_equal(first.log_prob[:, 0], before.log_prob[:8, 0])
    assert (second.log_prob[:, 0] != before.log_prob[8:16, 0]).all(), "the deviation has changed"


@pytest.mark.parametrize("num_envs", [1, 2])
def test_segments_say_that_there_is_no_next_episode(num_envs: int) -> None:
    """A segment may end with its last episode; the step after it cannot be made."""
    rollout = make_rollout("toy_envs:Audit", num_envs, short=4, long=4)
    segments = rollout.segments(4, next_from(range(num_envs)))
    assert next(segments).ended[-1].all()
    with pytest.raises(NoNextEpisode, match=f"only 0 of {num_envs}"):
        next(segments)


def test_one_environment_alone_says_so_too() -> None:
    segments = make_single("toy_envs:Audit", short=4, long=4).segments(5, next_from([0]))
    with pytest.raises(NoNextEpisode):
        next(segments)
