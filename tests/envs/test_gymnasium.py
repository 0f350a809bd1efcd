"""Gymnasium environments as freerun sees them."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from freerun.core import EnvFailure, UserError, episode_seed
from freerun.envs.gymnasium import GymnasiumFactory, make


def test_dict_observations_are_flattened_by_gymnasiums_own_tools() -> None:
    factory = GymnasiumFactory("toy_envs:DictObs")
    assert factory.spec.observation_space.shape == (4 + 3 + 2,)
    obs = factory.make(1).reset([0])
    np.testing.assert_array_equal(obs[0], [0.5, 0.5, 0.5, 0.5, 1, 0, 0, 1, 0])
    assert obs.dtype == np.float32


@pytest.mark.parametrize("kind", ["discrete", "multidiscrete", "box"])
def test_actions_arrive_as_the_environment_wants_them(kind: str) -> None:
    """OneBit asserts that its own action space holds what it gets: with a start, with a shape, within bounds."""
    env = GymnasiumFactory("toy_envs:OneBit", {"kind": kind}).make(1)
    env.reset([0])
    action = np.full((1, *env.spec.action_shape), 1, env.spec.action_space.dtype)
    assert np.isfinite(env.step(action * 100 if kind == "box" else action).reward).all()


def test_lane_rests_after_its_episode_until_it_is_reset() -> None:
    env = GymnasiumFactory("toy_envs:Audit", {"short": 2, "long": 2}).make(2)
    env.reset([1, None])
    ends = []
    for _ in range(4):  # Audit raises when it is stepped past its end, or before a reset
        result = env.step(np.zeros(2, np.int64))
        ends.append(bool(result.terminated[0] or result.truncated[0]))
    assert ends == [False, True, False, False]
    obs = env.reset([None, 2])
    assert obs[1, 1] == 0
    assert obs[0, 1] == np.float32(0.02), "the other lane is left alone"


def test_time_limit_truncates() -> None:
    env = GymnasiumFactory("toy_envs:Audit", {"short": 50, "long": 50}, max_episode_steps=3).make(1)
    env.reset([0])
    flags = [(bool(r.terminated[0]), bool(r.truncated[0])) for r in (env.step(np.zeros(1, np.int64)) for _ in range(3))]
    assert flags == [(False, False), (False, False), (False, True)]


def test_callables_can_be_lambdas() -> None:
    factory = GymnasiumFactory(lambda: gymnasium.make("CartPole-v1"))
    assert isinstance(factory.spec.action_space, spaces.Discrete)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise gymnasium.error.DependencyNotInstalled(
            "Box2D is not installed, you can install it by run `pip install …`"
        )

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(UserError, match=r"pip install 'freerun\[box2d\]'"):
        make("LunarLander-v3", {})


def test_error_in_the_constructor_keeps_its_traceback() -> None:
    def build() -> gymnasium.Env[object, object]:
        raise KeyError("missing scenario")

    with pytest.raises(EnvFailure, match=r"building the environment[\s\S]*missing scenario"):
        GymnasiumFactory(build)


def test_seeds_differ_between_episodes_and_runs() -> None:
    seeds = {episode_seed(run, episode) for run in range(30) for episode in range(300)}
    assert len(seeds) == 9000
    assert all(0 <= seed < 2**31 for seed in seeds)
