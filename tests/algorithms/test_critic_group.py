"""An asymmetric critic: the value function sees another group of observations than the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.tensor_envs import TensorEnvs
from freerun.algorithms.policies.mlp_actor import MLPActor
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout

ENV = "toy_envs:Privileged"
POLICY_NUMBERS = 2
"""How many numbers of a row the policy of `ENV` sees."""


def learned(env_args: dict[str, Any], **settings: Any) -> tuple[PPO, dict[str, float]]:
    """PPO after ten updates, and the metrics of the last."""
    factory = GymnasiumFactory(ENV, env_args)
    config = PPOConfig(
        episodes_per_update=40, learning_rate=5e-3, num_epochs=8, minibatch_size=100, gamma=0.9, **settings
    )
    ppo = PPO(factory.spec, config, 1, "cpu", False)
    rollout = Rollout(factory.make(1), ppo.policy, run_seed=1)
    metrics: dict[str, float] = {}
    for version in range(12):
        numbers = range(40 * version, 40 * version + 40)
        ppo.observe([segment.copy() for segment in rollout.episodes(next_from(numbers))])
        metrics = dict(ppo.update(version, 0.0))
    return ppo, metrics


def test_an_observation_is_a_row_with_the_policys_group_first() -> None:
    env = GymnasiumFactory(ENV).make_one()
    spec = env.env_spec
    assert (spec.policy_space.shape, spec.critic_space.shape) == ((2,), (3,))
    assert spec.observation_space == spaces.Box(0, 1, (5,), np.float32)
    obs, _ = env.reset(seed=4)
    bit = obs[0]
    assert obs.tolist() == [bit, 1 - bit, obs[2], 0.0, bit]  # Gymnasium would have sorted "critic" before "policy"


def test_an_algorithm_without_use_for_it_sees_the_policys_group_alone() -> None:
    factory = GymnasiumFactory(ENV, policy_group_only=True)
    assert factory.spec.observation_space.shape == factory.make_one().reset(seed=0)[0].shape == (2,)
    assert factory.spec.obs_groups is None


@pytest.mark.parametrize("learner", ["fast", "numpy", "torch"])
def test_values_know_what_only_the_critic_sees(learner: str) -> None:
    """Most of the return is luck that the critic's group tells of; without that it cannot be predicted."""
    _, told = learned({}, learner=learner)
    _, untold = learned({"tells": False}, learner=learner)
    assert told["explained_variance"] > 0.9
    assert untold["explained_variance"] < 0.5


def test_the_policy_acts_on_its_own_group_and_takes_it_alone_too() -> None:
    ppo, _ = learned({})
    policy = ppo.policy
    assert isinstance(policy, MLPActor)
    rows = np.random.default_rng(0).random((6, 5), np.float32)
    others = rows.copy()
    others[:, POLICY_NUMBERS:] += 1.0
    actor = policy.on(torch.device("cpu"), 0)
    state = actor.generator.get_state()
    on_device = []
    for obs in (rows, others, rows[:, :POLICY_NUMBERS]):
        np.testing.assert_array_equal(policy.act(obs, None).head, policy.act(rows, None).head)
        head = np.zeros(policy.head_size, np.float32)
        policy.single()(obs[0], policy.draw(np.random.default_rng(0), 1)[0], head)
        np.testing.assert_allclose(head, policy.act(rows[:1], None).head[0], rtol=1e-6)
        actor.generator.set_state(state)
        on_device.append(actor.act(torch.from_numpy(np.ascontiguousarray(obs)))[1])
    assert torch.equal(on_device[0], on_device[1])
    assert torch.equal(on_device[0], on_device[2])


def test_a_deployed_policy_needs_its_own_group_alone(tmp_path: Path) -> None:
    freerun.train(ENV, total_episodes=6, episodes_per_update=6, mode="sequential", run_dir=tmp_path / "run", quiet=True)
    policy = freerun.load_policy(tmp_path / "run", trust=[ENV])
    assert policy.observation_space.shape == (POLICY_NUMBERS,)
    one = np.array([1, 0], np.float32)
    whole = {"policy": one, "critic": np.zeros(3, np.float32)}
    assert policy.predict(one) == policy.predict(whole) == policy.predict({"policy": one})
    assert policy.predict([whole, whole]).tolist() == [policy.predict(one)] * 2
    assert len(freerun.evaluate(policy, episodes=3).returns) == 3


def test_sac_says_that_it_does_not_use_the_critics_group(tmp_path: Path) -> None:
    freerun.train(
        ENV,
        env_args={"num_actions": 1},
        algo="sac",
        mode="sequential",
        total_steps=60,
        learning_starts=30,
        hidden_sizes=(8,),
        run_dir=tmp_path / "run",
    )
    assert '"critic" observations are not used' in (tmp_path / "run" / "log.txt").read_text()


# ---------------------------------------------------------------------------------------------- tensors


def test_tensor_environments_without_the_critics_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.adapters.tensor_envs.TENSOR_ENVS", {"toy": "toy_tensors:build_privileged"})
    whole, cut = (TensorEnvs("toy", 3, 1, "cpu", 0, {}, policy_group_only=only) for only in (False, True))
    assert (whole.spec.observation_space.shape, cut.spec.observation_space.shape) == ((3,), (1,))
    assert (whole.spaces.observation.shape, cut.spaces.observation.shape) == ((1,), (1,))
    assert (whole.hides_critic_group, cut.hides_critic_group) == (False, True)
    assert torch.equal(cut.envs[0].reset(), whole.envs[0].reset()[:, :1])
    for _ in range(5):
        action = torch.zeros(3, 2)
        ours, theirs = cut.envs[0].step(action), whole.envs[0].step(action)
        assert torch.equal(ours.obs, theirs.obs[:, :1])
        assert torch.equal(ours.final_obs, theirs.final_obs[:, :1])
        assert torch.equal(ours.reward, theirs.reward)


@pytest.mark.parametrize("mode", ["sync", "batch"])
def test_ppo_on_tensors_values_what_the_policy_does_not_see(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are the number of the step, which only the critic sees."""
    monkeypatch.setattr("freerun.adapters.tensor_envs.TENSOR_ENVS", {"toy": "toy_tensors:build_privileged"})
    freerun.train(
        "toy",
        mode=mode,
        num_envs=8,
        num_steps_per_env=20,
        total_steps=160 * 40,
        learning_rate=1e-2,
        gamma=0.5,
        gae_lambda=0.5,
        run_dir=tmp_path / "run",
        quiet=True,
    )
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["explained_variance"] > 0.9
