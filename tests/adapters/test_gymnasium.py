"""Gymnasium environments as freerun sees them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import mistaken_envs
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces

import freerun
from freerun.adapters import env_packages
from freerun.adapters.gymnasium_envs import GymnasiumFactory, make
from freerun.core import EnvFailure, UserError, episode_seed


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


def test_an_environment_idles_after_its_episode_until_it_is_reset() -> None:
    env = GymnasiumFactory("toy_envs:Audit", {"short": 2, "long": 2}).make(2)
    env.reset([1, None])
    ends = []
    for _ in range(4):  # Audit raises when it is stepped past its end, or before a reset
        result = env.step(np.zeros(2, np.int64))
        ends.append(bool(result.terminated[0] or result.truncated[0]))
    assert ends == [False, True, False, False]
    obs = env.reset([None, 2])
    assert obs[1, 1] == 0
    assert obs[0, 1] == np.float32(0.02), "the other environment is left alone"


def test_time_limit_truncates() -> None:
    env = GymnasiumFactory("toy_envs:Audit", {"short": 50, "long": 50}, max_episode_steps=3).make(1)
    env.reset([0])
    flags = [(bool(r.terminated[0]), bool(r.truncated[0])) for r in (env.step(np.zeros(1, np.int64)) for _ in range(3))]
    assert flags == [(False, False), (False, False), (False, True)]


def test_callables_can_be_lambdas() -> None:
    factory = GymnasiumFactory(lambda: gymnasium.make("CartPole-v1"))
    assert isinstance(factory.spec.action_space, spaces.Discrete)


class AsksForHelp(toy_envs.DictObs):
    """Says itself what its user must do, once it is stepped."""

    def step(self, action: Any) -> Any:
        raise UserError("this simulator needs --envs-per-worker 1")


def test_what_an_environment_asks_of_its_user_is_said_as_it_is() -> None:
    env = GymnasiumFactory(AsksForHelp).make(1)
    env.reset([0])
    with pytest.raises(UserError, match=r"^this simulator needs --envs-per-worker 1$"):
        env.step(np.zeros(1, np.int64))


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise gymnasium.error.DependencyNotInstalled(
            "Box2D is not installed, you can install it by run `pip install …`"
        )

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(UserError, match=r"pip install 'freerun\[box2d\]'"):
        make("LunarLander-v3", {})


WITHOUT_ATARI = pytest.mark.skipif(importlib.util.find_spec("ale_py") is not None, reason="ale-py is installed")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param("ALE/Pong-v5", "pip install ale-py, and name it as ale_py:ALE/Pong-v5", marks=WITHOUT_ATARI),
        pytest.param(
            "PongNoFrameskip-v4", "pip install ale-py, and name it as ale_py:PongNoFrameskip-v4", marks=WITHOUT_ATARI
        ),
        pytest.param(
            "ale_py:ALE/Pong-v5", "needs something that is not installed: pip install ale-py", marks=WITHOUT_ATARI
        ),
        ("MiniGrid-Empty-5x5-v0", "pip install minigrid, and name it as minigrid:MiniGrid-Empty-5x5-v0"),
        ("highway-fast-v0", "pip install highway-env, and name it as highway_env:highway-fast-v0"),
        ("PyFlyt/QuadX-Hover-v4", "pip install pyflyt, and name it as PyFlyt.gym_envs:PyFlyt/QuadX-Hover-v4"),
        ("Nobody/Knows-v3", "namespace 'Nobody' .* install the package .* as in some_module:Nobody/Knows-v3"),
        ("Nobody/Ant-v5", "namespace 'Nobody' .* is not registered"),
        ("no_such_module:Nobody/Knows-v3", "No module named 'no_such_module'"),
        ("freerun/Stragler-v0", "did you mean freerun/Straggler-v0"),
        ("CartPol-v1", "did you mean CartPole-v1"),
    ],
)
def test_an_id_that_nobody_has_registered_is_told_with_what_brings_it(env: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        make(env, {})
    assert "Ant-v5?" not in str(told.value)


def test_a_package_that_is_there_need_only_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(env_packages.PACKAGES, "Toys/", env_packages.Package("toys", "registering_env"))
    monkeypatch.delitem(gymnasium.registry, "Toys/Audit-v0", raising=False)
    with pytest.raises(UserError, match=r"the package toys: name it as registering_env:Toys/Audit-v0"):
        make("Toys/Audit-v0", {})


def test_workers_import_the_module_that_registers_an_id(run_dir: Path) -> None:
    result = freerun.train(
        "registering_env:Toys/Audit-v0",
        mode="pipes",
        num_workers=2,
        total_episodes=4,
        episodes_per_update=4,
        run_dir=run_dir,
        quiet=True,
    )
    assert result.summary["episodes"] == 4


@pytest.mark.parametrize("env", ["mistaken_envs:vector", mistaken_envs.vector])
def test_a_vector_environment_is_named_as_one(env: Any) -> None:
    with pytest.raises(UserError, match=r"^mistaken_envs:vector returned a vector environment \(CartPole"):
        make(env, {})


def test_what_returns_no_environment_is_named() -> None:
    with pytest.raises(UserError, match=r"^toy_envs:not_an_env must return a gymnasium\.Env, but returned int"):
        make(toy_envs.not_an_env, {})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^functools:partial must return a gymnasium\.Env"):
        make(functools.partial(toy_envs.not_an_env), {})  # type: ignore[arg-type]


def test_error_in_the_constructor_keeps_its_traceback() -> None:
    def build() -> gymnasium.Env[object, object]:
        raise KeyError("missing scenario")

    with pytest.raises(EnvFailure, match=r"building the environment[\s\S]*missing scenario"):
        GymnasiumFactory(build)


def test_seeds_differ_between_episodes_and_runs() -> None:
    seeds = {episode_seed(run, episode) for run in range(30) for episode in range(300)}
    assert len(seeds) == 9000
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("env", "max_episode_steps", "limit"),
    [
        ("CartPole-v1", None, 500),
        ("CartPole-v1", 50, 50),
        ("CartPole-v1", 5000, 500),
        ("toy_envs:Audit", None, None),
        ("toy_envs:Audit", 50, 50),
        (lambda: gymnasium.make("CartPole-v1", max_episode_steps=70), None, 70),
        (lambda: gymnasium.make("CartPole-v1").unwrapped, None, None),  # its spec says 500, and nobody ends episodes
    ],
)
def test_the_time_limit_is_the_one_that_is_kept(env: Any, max_episode_steps: int | None, limit: int | None) -> None:
    assert GymnasiumFactory(env, max_episode_steps=max_episode_steps).spec.max_episode_steps == limit
