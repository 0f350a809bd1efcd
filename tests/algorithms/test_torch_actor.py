"""Networks that numpy cannot express: a user's own, run by torch in the workers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_networks
from gymnasium import spaces

import freerun
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.policies.torch_actor import TorchActor, build
from freerun.core import EnvSpec, UserError
from freerun.run.evaluation import evaluate

SETTINGS: dict[str, Any] = {
    "network": "toy_networks:cnn",
    "episodes_per_update": 20,
    "learning_rate": 5e-3,
    "minibatch_size": 50,
    "num_epochs": 4,
    "gamma": 0.5,
    "quiet": True,
}
SPEC = EnvSpec(spaces.Box(-1, 1, (5,), np.float32), spaces.Box(-1, 1, (2,), np.float32))


def test_a_convolution_learns_in_worker_processes(run_dir: Path) -> None:
    result = freerun.train(
        "toy_envs:Square",
        mode="freerun",
        num_workers=2,
        envs_per_worker=3,
        total_episodes=400,
        run_dir=run_dir,
        **SETTINGS,
    )
    assert result.summary["mean_return"] > 8, "ten is all there is, five is chance"
    assert np.mean(evaluate(result.run_dir, 5).returns) == 10
    policy = freerun.load_policy(result.run_dir)
    np.testing.assert_array_equal(policy.weights, result.policy.weights)


def test_a_network_of_this_very_script_can_be_given_as_it_is(run_dir: Path) -> None:
    result = freerun.train(
        "toy_envs:Square", total_episodes=20, run_dir=run_dir, **{**SETTINGS, "network": toy_networks.cnn}
    )
    assert result.policy.actor.describe()["network"] == "toy_networks:cnn"


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_log_probs_equal_those_of_the_learner(normalize_obs: bool) -> None:
    torch.manual_seed(0)
    spec = ActorSpec.of(SPEC, (), "tanh", normalize_obs)
    net = ActorCritic(
        spec,
        (
            build("toy_networks:layered", SPEC.policy_space, spec.output_size),
            build("toy_networks:layered", SPEC.critic_space, 1),
        ),
    )
    net.actor(torch.randn(64, 5))  # moves the batch statistics
    net.obs_mean.normal_()
    actor = TorchActor(spec, net.actor, "toy_networks:layered", scalar_actions=False, batch_invariant=False)
    net.export(actor)
    actor = pickle.loads(pickle.dumps(actor))
    obs = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    decision = actor.act(obs, actor.draw(np.random.default_rng(1), 9))
    net.eval()
    with torch.no_grad():
        head = net.actor(net.normalize(torch.from_numpy(obs)))
        expected = net.log_prob(head, torch.from_numpy(decision.action))
    np.testing.assert_allclose(actor.log_prob(decision.head, decision.action), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("toy_networks:no_module", "must return a torch.nn.Module, but returned int"),
        ("toy_networks:wrong_outputs", r"must return \(N, 2\) for N observations, but for 2 it returned \(2, 3\)"),
        ("toy_networks:wrong_inputs", r"fails on observations of shape \(2, 1, 8, 8\)"),
        ("toy_networks:nowhere", "module 'toy_networks' has no 'nowhere'"),
        ("nowhere:cnn", "is its folder on PYTHONPATH"),
    ],
)
def test_networks_that_do_not_fit_are_refused(network: str, message: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=message):
        freerun.train("toy_envs:Square", run_dir=run_dir, **{**SETTINGS, "network": network})
