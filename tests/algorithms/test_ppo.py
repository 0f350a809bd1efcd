"""PPO learns what it should, from data of any age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.ppo.objective import adapted_learning_rate
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.core import Demand, EnvSpec, FloatArray, Segment, UserError
from freerun.persistence.checkpoint import Checkpoints, newest


def make(env: str, config: PPOConfig, **env_args: object) -> tuple[PPO, Rollout]:
    factory = GymnasiumFactory(env, env_args)
    ppo = PPO(factory.spec, config, seed=1, device="cpu", deterministic=False)
    return ppo, Rollout(factory.make(1), ppo.policy, run_seed=1)


def episodes(rollout: Rollout, first: int, num: int) -> list[Segment]:
    return [segment.copy() for segment in rollout.episodes(next_from(range(first, first + num)))]


@pytest.mark.parametrize(("kind", "best"), [("discrete", 10.0), ("multidiscrete", 20.0), ("box", 10.0)])
def test_solves_a_small_environment_in_seconds(kind: str, best: float) -> None:
    config = PPOConfig(episodes_per_update=40, learning_rate=5e-3, num_epochs=8, minibatch_size=100, gamma=0.5)
    ppo, rollout = make("toy_envs:OneBit", config, kind=kind)
    for version in range(25):
        segments = episodes(rollout, 40 * version, 40)
        ppo.observe(segments)
        ppo.update(version, 0.0)
    assert np.mean([segment.reward.sum() for segment in segments]) > 0.85 * best


def test_value_of_a_truncated_episode_counts_what_would_have_come() -> None:
    config = PPOConfig(
        episodes_per_update=20, learning_rate=1e-2, gamma=0.9, num_epochs=10, gae_lambda=0.9, normalize_reward=False
    )
    ppo, rollout = make("toy_envs:Endless", config)
    for version in range(40):
        ppo.observe(episodes(rollout, 20 * version, 20))
        ppo.update(version, 0.0)
    value = ppo.net.value(torch.ones(1, 1)).item()
    assert value == pytest.approx(10.0, abs=0.5)  # 1 / (1 − 0.9); without the bootstrap it would be near 6


def test_demand_counts_down_and_is_empty_when_met() -> None:
    ppo, rollout = make("toy_envs:OneBit", PPOConfig(episodes_per_update=3))
    assert ppo.demand() == Demand(episodes=3)
    ppo.observe(episodes(rollout, 0, 2))
    assert ppo.demand() == Demand(episodes=1)
    ppo.observe(episodes(rollout, 2, 1))
    assert not ppo.demand()
    ppo, rollout = make("toy_envs:OneBit", PPOConfig(steps_per_update=25))
    ppo.observe(episodes(rollout, 0, 2))
    assert ppo.demand() == Demand(steps=5, next_steps=25)
    ppo.observe(episodes(rollout, 2, 1))
    assert not ppo.demand()


def test_ratio_is_one_without_lag_although_the_normaliser_moves() -> None:
    """Statistics that change between acting and learning would make the policy differ from itself."""
    config = PPOConfig(episodes_per_update=5, normalize_obs=True, num_epochs=1, minibatch_size=10**6)
    ppo, rollout = make("toy_envs:Audit", config)
    for version in range(4):
        ppo.observe(episodes(rollout, 5 * version, 5))
        metrics = ppo.update(version, 0.0)
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["clip_fraction"] == 0.0
    assert not np.allclose(ppo.policy.arrays["obs_mean"], 0.0)


def updated_weights(lag: int, **options: Any) -> FloatArray:
    """The policy after one update on data that is `lag` updates old."""
    ppo, rollout = make("toy_envs:OneBit", PPOConfig(episodes_per_update=10, learning_rate=1e-2, **options))
    segments = episodes(rollout, 0, 10)
    for version in range(lag):
        ppo.observe(episodes(rollout, 10 + 10 * version, 10))
        ppo.update(version, 0.0)
    ppo.observe(segments)
    ppo.update(lag, 0.0)
    return ppo.policy.weights.copy()


@pytest.mark.parametrize("lag", [0, 1])
def test_decoupled_objective_is_plain_ppo_without_lag_and_only_then(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoupled = updated_weights(lag)
    monkeypatch.setattr("freerun.algorithms.ppo.training_batch.proximal_log_prob", lambda behaviour, *_: behaviour)
    monkeypatch.setattr(
        "freerun.algorithms.ppo.training_batch.importance_weight", lambda behaviour, *_: torch.ones_like(behaviour)
    )
    assert np.array_equal(decoupled, updated_weights(lag)) == (lag == 0)


@pytest.mark.parametrize("lag", [0, 1])
def test_vtrace_is_plain_ppo_without_lag_and_only_then(lag: int) -> None:
    plain, corrected = updated_weights(lag), updated_weights(lag, lag_correction="vtrace")
    assert np.array_equal(plain, corrected) == (lag == 0)


def test_learning_rate_is_annealed() -> None:
    ppo, rollout = make("toy_envs:OneBit", PPOConfig(episodes_per_update=2, anneal_learning_rate=True))
    for version, progress in enumerate((0.0, 0.5)):
        ppo.observe(episodes(rollout, 2 * version, 2))
        assert ppo.update(version, progress)["learning_rate"] == pytest.approx(3e-4 * (1 - progress))


def test_update_stops_early_when_the_policy_has_moved_far_enough() -> None:
    far = PPOConfig(episodes_per_update=20, learning_rate=0.05, minibatch_size=20)
    near = PPOConfig(episodes_per_update=20, learning_rate=0.05, minibatch_size=20, target_kl=0.01)
    steps = []
    for config in (far, near):
        ppo, rollout = make("toy_envs:OneBit", config)
        ppo.observe(episodes(rollout, 0, 20))
        steps.append(ppo.update(0, 0.0)["num_gradient_steps"])
    assert steps[0] == 100
    assert 0 < steps[1] < 100


def test_the_last_update_of_a_run_may_have_a_single_step() -> None:
    factory = GymnasiumFactory("CartPole-v1", max_episode_steps=1)
    ppo = PPO(factory.spec, PPOConfig(steps_per_update=100), seed=1, device="cpu", deterministic=False)
    ppo.observe(episodes(Rollout(factory.make(1), ppo.policy, run_seed=1), 0, 1))
    assert all(np.isfinite(value) for value in ppo.update(0, 0.99).values())


def test_rewards_are_divided_by_the_deviation_of_the_return() -> None:
    ppo, rollout = make("toy_envs:Endless", PPOConfig(episodes_per_update=2, normalize_reward=True, gamma=0.5))
    ppo.observe(episodes(rollout, 0, 2))
    ppo.update(0, 0.0)
    # Discounted returns of one episode: 1, 1.5, 1.75, … 2 − 2^−9; both episodes alike.
    returns = np.array([2 - 0.5**step for step in range(10)])
    assert ppo.reward_scale.moments.variance == pytest.approx(returns.var(), rel=1e-5)


def test_state_continues_exactly() -> None:
    config = PPOConfig(episodes_per_update=5, normalize_obs=True, normalize_reward=True)
    first, rollout = make("toy_envs:Audit", config)
    first.observe(episodes(rollout, 0, 5))
    first.update(0, 0.0)
    second, _ = make("toy_envs:Audit", config)
    second.load_state_dict(first.state_dict())
    segments = episodes(rollout, 5, 5)
    for ppo in (first, second):
        ppo.observe(segments)
        ppo.update(1, 0.0)
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)


def test_a_restored_learning_rate_lies_where_recorded_gradient_steps_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything but the recording itself is as on a GPU; the state takes the way through a checkpoint on disk."""
    monkeypatch.setattr("freerun.algorithms.ppo.ppo.acceleration_of", lambda *_: "graph")
    config = PPOConfig(episodes_per_update=4, minibatch_size=20, anneal_learning_rate=True)
    first, rollout = make("toy_envs:OneBit", config)
    first.observe(episodes(rollout, 0, 4))
    first.update(0, 0.0)
    Checkpoints(tmp_path, 1).write(1, {"algorithm": first.state_dict()}, b"policy")
    second, _ = make("toy_envs:OneBit", config)
    read_by_the_graph = second.optimizers()["optimizer"].param_groups[0]["lr"]
    assert isinstance(read_by_the_graph, torch.Tensor)
    second.load_state_dict(newest(tmp_path).state["algorithm"])
    assert second.optimizers()["optimizer"].param_groups[0]["lr"] is read_by_the_graph
    segments = episodes(rollout, 4, 4)
    for ppo in (first, second):
        ppo.observe(segments)
        ppo.update(1, 0.75)
        assert float(ppo.optimizers()["optimizer"].param_groups[0]["lr"]) == pytest.approx(3e-4 / 4)
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"episodes_per_update": 0}, "--episodes-per-update must be at least 1, not 0"),
        ({"episodes_per_update": 1, "steps_per_update": 1}, "not both"),
        ({"gamma": 1.5}, "--gamma must lie between 0 and 1"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"value_clip": 0.0}, "--value-clip must be above 0"),
        ({"max_importance_weight": 0.5}, "--max-importance-weight must be at least 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PPOConfig(**settings)  # type: ignore[arg-type]


def test_the_learning_rate_follows_the_desired_change_of_the_policy() -> None:
    def next_rate(kl: float, learning_rate: float = 3e-4) -> float:
        return float(adapted_learning_rate(torch.tensor(learning_rate), torch.tensor(kl), 0.01))

    assert next_rate(0.021) == pytest.approx(2e-4)  # twice as far as desired: by 1.5 down
    assert next_rate(0.004) == pytest.approx(4.5e-4)  # not half as far: by 1.5 up
    assert next_rate(0.01) == pytest.approx(3e-4)
    assert next_rate(1.0, 1.1e-5) == pytest.approx(1e-5)
    assert next_rate(0.0, 9e-3) == pytest.approx(1e-2)


@pytest.mark.parametrize("learner", ["fast", "numpy", "torch"])
def test_gradient_steps_that_move_the_policy_little_raise_the_learning_rate(learner: Any) -> None:
    """Two minibatches of 20: the first of an update says nothing, because no step came before it."""
    config = PPOConfig(
        episodes_per_update=4, minibatch_size=20, learning_rate=1e-5, num_epochs=1, desired_kl=0.5, learner=learner
    )
    ppo, rollout = make("toy_envs:OneBit", config)
    rates = []
    for version in range(3):
        ppo.observe(episodes(rollout, 4 * version, 4))
        rates.append(ppo.update(version, 0.0)["learning_rate"])
    assert rates == pytest.approx([1.5e-5, 2.25e-5, 3.375e-5])
    with pytest.raises(UserError, match="--desired-kl and --anneal-learning-rate both set the learning rate"):
        PPOConfig(desired_kl=0.01, anneal_learning_rate=True)


def test_bits_stay_as_they_are_where_observations_are_normalised() -> None:
    """Of two numbers, one is a bit and one is a position: only the position gets a mean and a scale."""
    low, high = np.array([0, -50], np.float32), np.array([1, 50], np.float32)
    env = EnvSpec(spaces.Box(low, high), spaces.Discrete(2))
    ppo = PPO(env, PPOConfig(steps_per_update=4, normalize_obs=True), 0, "cpu", False)
    obs = np.array([[[0, 10]], [[1, 20]], [[0, 30]], [[0, 40]]], np.float32)
    number, flag, zero = np.zeros((4, 1), np.int64), np.zeros((4, 1), np.bool_), np.zeros((4, 1), np.float32)
    ppo.observe([Segment(obs, number, zero - 0.7, zero, flag, flag, obs, number, number, 0.0)])
    ppo.update(0, 0.0)
    assert ppo.net.obs_mean.tolist() == [0.0, 25.0]
    assert ppo.net.obs_scale.tolist() == pytest.approx([1.0, 125**-0.5])
