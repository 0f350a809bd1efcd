"""Vector environments of others: what becomes of their steps, by hand, in each of Gymnasium's ways to reset."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import toy_vectors

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.vector_envs import OneOfVector
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.core import BatchReset, EnvFailure, Segment, UserError

MODES = ("NEXT_STEP", "SAME_STEP", "DISABLED")
FIELDS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "next_obs", "version")


def make_rollout(env_name: str, num_envs: int, **env_args: Any) -> Rollout:
    factory = GymnasiumFactory(env_name, env_args)
    spec = ActorSpec.of(factory.spec, (8,), "tanh")
    policy = MLPActor(spec, scalar_actions=factory.spec.action_shape == (), batch_invariant=True)
    policy.load(np.random.default_rng(0).normal(size=policy.weights.size).astype(np.float32))
    return Rollout(factory.make(num_envs), policy, run_seed=7)


def segments(mode: str, num_segments: int, num_steps: int) -> list[Segment]:
    rollout = make_rollout("toy_vectors:Counting", 2, mode=mode)
    made = rollout.segments(num_steps, next_from(itertools.count()))
    return [segment.copy() for segment in itertools.islice(made, num_segments)]


def test_a_row_in_which_an_environment_resets_is_no_step() -> None:
    """Environment 0 has episodes of two steps, environment 1 of three; the segment needs 2 × 4 steps."""
    (segment,) = segments("NEXT_STEP", 1, 4)
    assert segment.resting is not None
    no, yes = False, True
    assert segment.resting.tolist() == [[no, no], [no, no], [yes, no], [no, yes], [no, no]]
    assert segment.num_steps == 8
    # Column 0: steps 1 and 2 of episode 0, a reset, steps 1 and 2 of the next one, which is truncated.
    first, second, third, fourth = without_resting_rows([segment])
    assert first.obs[:, 0].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert first.next_obs[:, 0].tolist() == [[0, 0, 1], [0, 0, 2]]  # the last one is the final observation
    assert first.terminated[:, 0].tolist() == [no, yes]
    assert first.reward[:, 0].tolist() == [1, 2]
    assert second.obs[:, 0].tolist() == [[0, 1, 0], [0, 1, 1]]
    assert second.next_obs[-1, 0].tolist() == [0, 1, 2]
    assert (second.terminated[:, 0].tolist(), second.truncated[:, 0].tolist()) == ([no, no], [no, yes])
    # Column 1: the three steps of its first episode, a reset, and one step.
    assert third.obs[:, 0, 2].tolist() == [0, 1, 2]
    assert third.next_obs[-1, 0].tolist() == [1, 0, 3]
    assert fourth.obs[:, 0].tolist() == [[1, 1, 0]]
    assert all(part.resting is None for part in (first, second, third, fourth))
    assert [len(np.unique(part.episode)) for part in (first, second, third, fourth)] == [1, 1, 1, 1]


def test_columns_without_such_rows_stay_together() -> None:
    first, _ = segments("NEXT_STEP", 2, 2)
    assert first.resting is None  # the first reset comes after the segment
    assert len(without_resting_rows([first])) == 1


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
def test_final_observations_belong_to_their_episodes(mode: str) -> None:
    (segment,) = segments(mode, 1, 5)
    assert segment.resting is None
    # Of environment 0: [episode, step] before and after each step.
    assert segment.obs[:, 0, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    assert segment.next_obs[:, 0, 1:].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 1]]
    assert segment.terminated[:, 0].tolist() == [False, True, False, False, False]
    assert segment.truncated[:, 0].tolist() == [False, False, False, True, False]


def test_all_ways_to_reset_give_the_same_steps() -> None:
    """The observations and rewards of each environment, in order, over several segments."""

    def steps(mode: str) -> list[list[Any]]:
        parts = without_resting_rows(segments(mode, 4, 7))
        found: list[list[Any]] = [[], []]
        for part in parts:
            for column in range(part.obs.shape[1]):
                columns = [getattr(part, name)[:, column].tolist() for name in ("obs", "next_obs", "reward")]
                found[int(part.obs[0, column, 0])] += zip(*columns, strict=True)
        return found

    by_mode = {mode: steps(mode) for mode in MODES}
    for mode, found in by_mode.items():
        for mine, reference in zip(found, by_mode["DISABLED"], strict=True):
            num = min(len(mine), len(reference))
            assert num >= 25, mode
            assert mine[:num] == reference[:num], mode


@pytest.mark.parametrize("mode", MODES)
def test_one_environment_of_a_vector_is_an_environment(mode: str) -> None:
    env = GymnasiumFactory("toy_vectors:Counting", {"mode": mode}).make_one()
    one = env.unwrapped
    assert isinstance(one, OneOfVector)
    obs, _ = env.reset(seed=3)
    assert obs.dtype == np.float32
    assert obs.tolist() == [0, 0, 0]
    env.step(0)
    obs, reward, terminated, truncated, _ = env.step(1)
    assert (obs.tolist(), reward, terminated, truncated) == ([0, 0, 2], 2.0, True, False)
    env.reset(seed=4)
    assert one.vector.seeds == [3, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env", "env_args"),
    [("Audit", {"short": 3, "long": 11}), ("OneBit", {"kind": "multidiscrete"}), ("OneBit", {"kind": "box"})],
)
def test_without_autoreset_every_episode_has_its_seed(env: str, env_args: dict[str, Any]) -> None:
    """So whole episodes are the same as in environments that are stepped one by one, also where some rest."""

    def episodes(name: str, **more: Any) -> dict[int, Segment]:
        rollout = make_rollout(name, 3, **env_args, **more)
        found = {int(segment.episode[0, 0]): segment.copy() for segment in rollout.episodes(next_from([4, 5, 6, 7, 8]))}
        assert len(found) == 5
        return found

    mine, reference = episodes("toy_vectors:synced", env=env, mode="DISABLED"), episodes(f"toy_envs:{env}")
    for number, segment in reference.items():
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(mine[number], name), getattr(segment, name), err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["discrete", "multidiscrete"])
@pytest.mark.parametrize("masks", ["info", "observation"])
def test_masks_are_kept_to(mode: str, kind: str, masks: str) -> None:
    """The environment raises at an action that its mask does not allow."""
    env_args = {"env": "Masked", "mode": mode, "kind": kind, "masks": masks}
    rollout = make_rollout("toy_vectors:synced", 3, **env_args)
    made = rollout.segments(40, next_from(itertools.count()))
    for segment in itertools.islice(made, 3):
        assert segment.num_steps >= 120
        assert segment.ended.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", ["info", "observation"])
@pytest.mark.parametrize("tells_last", [True, False])
def test_the_mask_of_a_last_observation_is_that_of_its_own_episode(mode: str, masks: str, tells_last: bool) -> None:
    """DQN needs it after a truncation. Here all environments end at once, and then none may give a mask."""
    expected = [[0, 1, 0], [0, 0, tells_last]] * 2
    env_args = {"env": "MaskedCut", "mode": mode, "masks": masks, "tells_last": tells_last}
    rollout = make_rollout("toy_vectors:synced", 2, **env_args)
    segment = next(rollout.segments(4, next_from(itertools.count())))
    parts = without_resting_rows([segment.copy()])
    ends = np.concatenate([part.next_obs[:, 0, 1:] for part in parts])[:4]
    assert ends.tolist() == expected
    one = GymnasiumFactory("toy_vectors:synced", env_args).make_one()
    one.reset(seed=0)
    assert [one.step(choice)[0][1:].tolist() for choice in (0, 1)] == expected[:2]


def test_gymnasium_s_own_vector_cart_pole() -> None:
    factory = GymnasiumFactory("vector:CartPole-v1")
    assert factory.spec.batch_reset is BatchReset.NEXT_STEP
    rollout = make_rollout("vector:CartPole-v1", 8)
    for segment in itertools.islice(rollout.segments(100, next_from(itertools.count())), 2):
        assert 800 <= segment.num_steps < 808
        for part in without_resting_rows([segment.copy()]):
            # Within an episode the next observation is the observation of the next row, and a reset is never a step.
            goes_on = ~part.ended[:-1]
            np.testing.assert_array_equal(part.next_obs[:-1][goes_on], part.obs[1:][goes_on])
            assert (part.reward == 1).all()
            is_out = np.abs(part.next_obs[..., 2]) > 12 * 2 * np.pi / 360
            np.testing.assert_array_equal(is_out | (np.abs(part.next_obs[..., 0]) > 2.4), part.terminated)


def test_envpool_s_cart_pole() -> None:
    pytest.importorskip("envpool")
    rollout = make_rollout("envpool:CartPole-v1", 8)
    for segment in itertools.islice(rollout.segments(100, next_from(itertools.count())), 2):
        for part in without_resting_rows([segment.copy()]):
            assert (part.reward == 1).all()
            is_out = np.abs(part.next_obs[..., 2]) > 12 * 2 * np.pi / 360
            np.testing.assert_array_equal(is_out | (np.abs(part.next_obs[..., 0]) > 2.4), part.terminated)


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("toy_vectors:always_two", {}, "returned a vector environment .*: it must take an argument num_envs"),
        ("toy_vectors:Counting", {"env_args": {"num_envs": 3}}, "give --envs-per-worker"),
        ("toy_vectors:one_env", {}, "takes num_envs, so it must return a gymnasium.vector.VectorEnv"),
        ("toy_vectors:SilentCounting", {}, "does not say when it resets itself"),
        ("toy_vectors:Counting", {"max_episode_steps": 9}, "--max-episode-steps cannot cut the episodes of a vector"),
        ("vector:Acrobot-v1", {}, "Acrobot-v1 has no vector version of its own: leave vector: out"),
        ("vector:NoSuch-v1", {}, "there is no environment 'vector:NoSuch-v1'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(env: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GymnasiumFactory(env, **settings)


@pytest.mark.parametrize("env", ["toy_vectors:optional", toy_vectors.optional, toy_vectors.Counting])
def test_the_number_of_environments_is_asked_for(env: Any) -> None:
    factory = GymnasiumFactory(env)
    assert factory.is_vector
    assert factory.make(3).num_envs == 3
    assert factory.make(1).num_envs == 1


def test_a_missing_final_observation_is_an_error() -> None:
    rollout = make_rollout("toy_vectors:Counting", 2, mode="SAME_STEP", with_final_obs=False)
    with pytest.raises(UserError, match='its info has no "final_obs"'):
        next(rollout.segments(4, next_from(itertools.count())))


def test_whole_episodes_cannot_be_asked_of_environments_that_reset_themselves() -> None:
    rollout = make_rollout("toy_vectors:Counting", 2)
    with pytest.raises(UserError, match="starts its episodes by itself"):
        next(rollout.episodes(next_from([0])))


def test_an_exception_of_the_environment_has_its_traceback() -> None:
    rollout = make_rollout("toy_vectors:synced", 2, env="Broken", mode="NEXT_STEP", how="raise")
    made = rollout.segments(8, next_from(itertools.count()))
    with pytest.raises(
        EnvFailure, match=r"(?s)the vector environment raised in step, after \d+ steps\nTraceback.*fell over"
    ):
        list(itertools.islice(made, 5))


def test_dict_observations_are_joined_row_by_row() -> None:
    rollout = make_rollout("toy_vectors:synced", 2, env="DictObs", mode="SAME_STEP")
    reference = make_rollout("toy_envs:DictObs", 2)
    mine, other = (next(each.segments(4, next_from(itertools.count()))) for each in (rollout, reference))
    assert mine.obs.shape == other.obs.shape
    assert mine.obs.dtype == other.obs.dtype
    np.testing.assert_array_equal(mine.reward, other.reward)
