"""The fast learner beside autograd: the same weights after 100 gradient steps, whatever the settings.

`fast` is the compiled kernel where this machine has a compiler, and `numpy` what computes where there is none."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, ObsGroups, Segment, UserError

OBS = spaces.Box(-np.inf, np.inf, (5,), np.float32)
ActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box
ACTIONS: dict[str, ActionSpace] = {
    "discrete": spaces.Discrete(4),
    "many-choices": spaces.Discrete(145),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4]),
    "box": spaces.Box(-1, 1, (3,), np.float32),
}
WRITTEN_OUT = ("fast", "numpy")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole-batches": {"minibatch_size": 203, "hidden_sizes": (70, 33)},  # of more rows than the kernel's blocks
    "relu": {"activation": "relu"},
    "one-hidden-layer": {"hidden_sizes": (17,)},
    "entropy": {"entropy_coef": 0.05},
    "kl-stop": {"target_kl": 0.01},
    "vtrace": {"lag_correction": "vtrace"},
    "raw-advantage": {"normalize_advantage": False},
    "normalized": {"normalize_obs": True, "normalize_reward": True},
    "annealed": {"anneal_learning_rate": True},
    "small-steps": {"max_grad_norm": 0.01},
    "elu": {"activation": "elu"},
    "clipped-values": {"value_clip": 0.05},
    "advantage-of-the-batch": {"advantage_rows": "update"},
    "adaptive-rate": {"desired_kl": 0.005},
}


def segment(ppo: PPO, rng: np.random.Generator, version: int, num_steps: int = 203) -> Segment:
    """Made-up steps with the policy's own actions: the same ones for both learners."""
    obs = rng.standard_normal((num_steps, 1, *OBS.shape), np.float32)
    noise = ppo.policy.draw(rng, num_steps)
    decision = ppo.policy.act(obs[:, 0], noise)
    log_prob = ppo.policy.log_prob(decision.head, decision.action)
    ended = np.zeros((num_steps, 1), np.bool_)
    ended[-1] = True
    numbers = np.full((num_steps, 1), version, np.int64)
    reward = rng.standard_normal((num_steps, 1), np.float32) + obs[:, :, 0]
    action = decision.action[:, None]
    next_obs = np.roll(obs, -1, axis=0)
    return Segment(obs, action, log_prob[:, None], reward, ended, np.zeros_like(ended), next_obs, numbers, numbers, 0.1)


def train(env: EnvSpec, lag: int, num_updates: int, **settings: Any) -> tuple[PPO, list[dict[str, float]]]:
    ppo = PPO(env, PPOConfig(**{"minibatch_size": 20, "num_epochs": 5, **settings}), 0, "cpu", False)
    rng = np.random.default_rng(1)
    metrics = []
    for version in range(lag, lag + num_updates):
        ppo.observe([segment(ppo, rng, version - lag)])
        metrics.append(dict(ppo.update(version, (version - lag) / num_updates)))
    return ppo, metrics


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS.keys())
def test_fast_and_autograd_end_at_the_same_weights(actions: ActionSpace, settings: dict[str, Any], lag: int) -> None:
    env = EnvSpec(OBS, actions)
    torch_one, torch_metrics = train(env, lag, 2, learner="torch", **settings)
    before = PPO(env, torch_one.config, 0, "cpu", False)
    reference = torch_one.policy.weights
    assert np.abs(reference - before.policy.weights).max() > 1e-3  # it has moved, and far more than the two differ
    for learner in WRITTEN_OUT:
        fast, fast_metrics = train(env, lag, 2, learner=learner, **settings)
        np.testing.assert_allclose(fast.policy.weights, reference, atol=2e-5, err_msg=learner)
        for one, other in zip(fast_metrics, torch_metrics, strict=True):
            assert one["num_gradient_steps"] == other["num_gradient_steps"]
            assert one == pytest.approx(other, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"normalize_obs": True}], ids=["plain", "normalized"])
def test_both_learners_end_at_the_same_weights_with_a_group_for_the_critic(settings: dict[str, Any], lag: int) -> None:
    policy, critic = (spaces.Box(-np.inf, np.inf, (size,), np.float32) for size in (2, 3))
    env = EnvSpec.of_groups(ObsGroups(policy, critic), ACTIONS["box"], reports_final_obs=True)
    torch_one, _ = train(env, lag, 2, learner="torch", **settings)
    for learner in WRITTEN_OUT:
        fast, _ = train(env, lag, 2, learner=learner, **settings)
        for name, weight in fast.net.state_dict().items():
            torch.testing.assert_close(weight, torch_one.net.state_dict()[name], atol=2e-5, rtol=1e-4)


def test_a_run_may_go_on_with_the_other_learner() -> None:
    env = EnvSpec(OBS, ACTIONS["box"])
    fast, _ = train(env, 0, 1, learner="fast")
    states = []
    for learner in (*WRITTEN_OUT, "torch"):
        ppo = PPO(env, PPOConfig(minibatch_size=20, num_epochs=5, learner=cast(Any, learner)), 0, "cpu", False)
        ppo.load_state_dict(fast.state_dict())
        ppo.observe([segment(ppo, np.random.default_rng(2), 1)])
        ppo.update(1, 0.5)
        states.append(ppo.state_dict())
    assert [state["optimizer"]["state"][0]["step"] for state in states] == [100, 100, 100]
    for state in states[:2]:
        for name, value in state["net"].items():
            torch.testing.assert_close(value, states[2]["net"][name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("learner", WRITTEN_OUT)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(learner: Any) -> None:
    env = EnvSpec(OBS, ACTIONS["discrete"])
    plain: dict[str, Any] = dict.fromkeys(("normalize_advantage", "normalize_obs", "normalize_reward"), False)
    ppo = PPO(env, PPOConfig(minibatch_size=1000, num_epochs=1, learner=learner, **plain), 0, "cpu", False)
    before = ppo.policy.weights.copy()
    bad = segment(ppo, np.random.default_rng(0), 0)
    bad.reward[3] = np.inf
    ppo.observe([bad])
    metrics = ppo.update(0, 0.0)
    assert metrics["bad_gradients"] == 1
    np.testing.assert_array_equal(ppo.policy.weights, before)


@pytest.mark.parametrize("learner", WRITTEN_OUT)
@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS.keys())
def test_the_same_rows_give_the_same_bits_wherever_memory_lies(actions: ActionSpace, learner: Any) -> None:
    env, kept, found = EnvSpec(OBS, actions), [], []
    for size in (0, 1, 5, 13):
        kept.append(np.zeros(size, np.float32))  # so that the next arrays lie elsewhere
        ppo, _ = train(env, 1, 2, learner=learner, entropy_coef=0.01, hidden_sizes=(19, 64))
        found.append(ppo.policy.weights)
        kept.append(ppo.policy.weights)
    for weights in found[1:]:
        np.testing.assert_array_equal(weights, found[0])


def test_fast_is_refused_where_it_cannot_be() -> None:
    env = EnvSpec(OBS, ACTIONS["discrete"])
    with pytest.raises(UserError, match="--learner fast is for MLPs"):
        PPO(env, PPOConfig(learner="fast", network="some:network"), 0, "cpu", False)
