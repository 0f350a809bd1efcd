"""Trained policies that need to be told which actions are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Masked

import freerun
from freerun.core import UserError

QUICK: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "quiet": True, "mode": "sequential"}


def trained(env: str, path: Path, **env_args: Any) -> Any:
    freerun.train(env, env_args=env_args, run_dir=path, **QUICK)
    return freerun.load_policy(path, trust=[env], seed=0)


def test_predict_takes_the_mask_and_insists_on_it(tmp_path: Path) -> None:
    policy = trained("toy_envs:Masked", tmp_path / "run")
    obs = np.array([0.5, 1.0, 0.2, 0.1])
    for choice in range(4):
        mask = np.arange(4) == choice
        for deterministic in (True, False):
            assert policy.predict(obs, deterministic, action_mask=mask) == 3 + choice  # its actions begin at 3
        assert policy.logits(obs, action_mask=mask).argmax() == choice
    batch = policy.predict([obs, obs], action_mask=[[1, 0, 0, 0], [0, 0, 0, 1]])
    assert batch.tolist() == [3, 6]
    with pytest.raises(UserError, match=r"trained with action masks: give predict\(obs, action_mask=...\)"):
        policy.predict(obs)
    with pytest.raises(UserError, match="it has 3 numbers, but there are 4 choices"):
        policy.predict(obs, action_mask=[1, 1, 1])
    with pytest.raises(UserError, match="forbids every action"):
        policy.predict(obs, action_mask=np.zeros(4))
    with pytest.raises(UserError, match="there are 1 masks for 2 observations"):
        policy.predict([obs, obs], action_mask=[np.ones(4)])


def test_a_mask_in_the_observation_need_not_be_given_again(tmp_path: Path) -> None:
    policy = trained("toy_envs:Masked", tmp_path / "run", masks="observation", kind="multidiscrete")
    env = Masked("observation", "multidiscrete")
    assert policy.observation_space == spaces.Box(0, 2, (5,), np.float32)
    obs, _ = env.reset(seed=1)
    others, _ = env.reset(seed=2)
    one = policy.predict(obs)
    np.testing.assert_array_equal(policy.predict([obs, others])[0], one)
    np.testing.assert_array_equal(policy.predict({name: np.stack([obs[name]] * 2) for name in obs})[1], one)
    alone = obs["observation"]
    np.testing.assert_array_equal(policy.predict(alone, action_mask=obs["action_mask"]), one)
    # Gymnasium's own masks of MultiDiscrete actions are a tuple with an array for each.
    pair = np.split(obs["action_mask"], [3])
    np.testing.assert_array_equal(policy.predict(alone, action_mask=tuple(pair)), one)
    ended = False
    while not ended:
        obs, _, ended, _, _ = env.step(policy.predict(obs))
    assert len(freerun.evaluate(policy, episodes=3).returns) == 3


def test_a_policy_without_masks_takes_none(tmp_path: Path) -> None:
    policy = trained("toy_envs:OneBit", tmp_path / "run")
    with pytest.raises(UserError, match="trained without action masks"):
        policy.predict(np.zeros(2), action_mask=[1, 1])


def test_a_run_starts_from_another_that_had_masks_too(tmp_path: Path) -> None:
    freerun.train("toy_envs:Masked", run_dir=tmp_path / "first", **QUICK)
    freerun.train("toy_envs:MaskedByMethod", run_dir=tmp_path / "next", init_from=tmp_path / "first", **QUICK)
    other: dict[str, Any] = {"env_args": {"masks": "nowhere"}, "init_from": tmp_path / "first"}
    with pytest.raises(UserError, match="that run's environment has action masks, and this one has none"):
        freerun.train("toy_envs:Masked", run_dir=tmp_path / "other", **other, **QUICK)


class MaskedBox(gymnasium.Env[Any, Any]):
    """Masks are of no use for continuous actions."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, True, False, {}

    def action_masks(self) -> Any:
        return np.ones(2)


def test_a_mask_for_continuous_actions_is_not_used_and_that_is_said(tmp_path: Path) -> None:
    freerun.train(MaskedBox, run_dir=tmp_path / "run", total_episodes=4, episodes_per_update=2, mode="sequential")
    assert "the environment's action masks are not used" in (tmp_path / "run" / "log.txt").read_text()
