"""Three lines of Python do what the command line does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import toy_envs

import freerun
from freerun.core import UserError
from freerun.settings import registry
from freerun.settings.config import TrainConfig


def test_train_with_a_callable_and_use_the_policy(run_dir: Path) -> None:
    result = freerun.train(
        lambda: gymnasium.make("CartPole-v1", max_episode_steps=50),
        mode="pipes",
        num_workers=2,
        total_episodes=8,
        episodes_per_update=4,
        run_dir=run_dir,
        quiet=True,
    )
    assert result.summary["episodes"] == 8
    policy = freerun.load_policy(result.run_dir)
    np.testing.assert_array_equal(policy.weights, result.policy.weights)
    assert policy.predict(np.zeros((1, 4), np.float32)).shape == (1,)


@pytest.mark.parametrize(
    ("env", "example"),
    [
        (gymnasium.make("CartPole-v1"), 'freerun.train("CartPole-v1")'),
        (toy_envs.Audit(), "freerun.train(Audit)"),
        (gymnasium.make_vec("CartPole-v1", num_envs=2), 'freerun.train("CartPole-v1")'),
    ],
)
def test_an_environment_that_is_made_already_is_refused_in_one_sentence(env: Any, example: str) -> None:
    with pytest.raises(UserError, match="pass its id, its class or a function that makes it, as in ") as told:
        freerun.train(env)
    assert str(told.value).endswith(example)
    assert "\n" not in str(told.value)


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(UserError, match="unknown setting 'num_worker': did you mean num_workers"):
        freerun.train("CartPole-v1", num_worker=3)


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_settings_of_run_and_algorithm_share_no_name(name: str) -> None:
    """They share one flat namespace: flags, config.json, keyword arguments."""
    of_algorithm = {field.name for field in dataclasses.fields(registry.ALGORITHMS[name].load_config())}
    of_run = {field.name for field in dataclasses.fields(TrainConfig)}
    assert not of_algorithm & of_run


def test_config_survives_its_own_file() -> None:
    config = registry.make_config({"env": "CartPole-v1", "hidden_sizes": (8, 8), "run_dir": "x", "max_lag": 2})
    assert registry.make_config(registry.flatten_config(config)) == config
