"""The numpy actor is the torch policy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import ActorCritic
from freerun.core import FloatArray, UserError

SPECS = {
    "discrete": ActorSpec(5, (32, 16), "tanh", (7,), 0, False),
    "multidiscrete": ActorSpec(5, (32,), "relu", (2, 3, 4), 0, True),
    "gaussian": ActorSpec(5, (32, 16), "tanh", (), 3, True),
    "many": ActorSpec(5, (32,), "tanh", (90,), 0, False),
    "many each": ActorSpec(5, (32,), "relu", (70, 3), 0, True),
    "linear": ActorSpec(5, (), "tanh", (4,), 0, False),
}


def make(name: str, batch_invariant: bool = False) -> tuple[ActorCritic, MLPActor]:
    torch.manual_seed(1)
    spec = SPECS[name]
    net = ActorCritic(spec)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    net.obs_mean.normal_()
    net.obs_scale.uniform_(0.5, 2.0)
    actor = MLPActor(spec, scalar_actions=len(spec.categories) == 1, batch_invariant=batch_invariant)
    net.export(actor)
    return net, actor


def observations(num_rows: int) -> FloatArray:
    return np.random.default_rng(0).normal(size=(num_rows, 5)).astype(np.float32)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_rows", [1, 33])
def test_log_probs_equal_those_of_torch(name: str, num_rows: int) -> None:
    net, actor = make(name)
    obs = observations(num_rows)
    noise = actor.draw(np.random.default_rng(0), num_rows)
    decision = actor.act(obs, noise)
    with torch.no_grad():
        head = net.actor(net.normalize(torch.from_numpy(obs)))
        expected = net.log_prob(head, torch.from_numpy(decision.action))
    log_prob = actor.log_prob(decision.head, decision.action)
    np.testing.assert_allclose(log_prob, expected.numpy(), atol=1e-5)
    assert log_prob.dtype == np.float32


@pytest.mark.parametrize("name", ["discrete", "multidiscrete", "many", "many each", "linear"])
def test_categories_come_up_as_often_as_their_probability_says(name: str) -> None:
    net, actor = make(name)
    obs = observations(1)
    noise = actor.draw(np.random.default_rng(3), 20_000)
    actions = np.array([actor.act(obs, noise[i : i + 1]).action[0] for i in range(len(noise))]).reshape(len(noise), -1)
    with torch.no_grad():
        head = net.actor(net.normalize(torch.from_numpy(obs)))[0]
    for column, logits in enumerate(head.split(list(SPECS[name].categories))):
        counts = np.bincount(actions[:, column], minlength=len(logits)) / len(actions)
        np.testing.assert_allclose(counts, logits.softmax(0).numpy(), atol=0.015)


def test_gaussian_actions_have_the_mean_and_deviation_of_the_policy() -> None:
    net, actor = make("gaussian")
    obs = np.repeat(observations(1), 20_000, axis=0)
    actions = actor.act(obs, actor.draw(np.random.default_rng(3), len(obs))).action
    with torch.no_grad():
        mean = net.actor(net.normalize(torch.from_numpy(obs[:1])))[0].numpy()
        deviation = net.log_std.exp().numpy()
    np.testing.assert_allclose(actions.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(actions.std(axis=0), deviation, rtol=0.03)


@pytest.mark.parametrize("name", SPECS)
def test_without_noise_the_most_likely_action(name: str) -> None:
    net, actor = make(name)
    obs = observations(9)
    with torch.no_grad():
        head = net.actor(net.normalize(torch.from_numpy(obs)))
    action = actor.act(obs, None).action.reshape(9, -1)
    if SPECS[name].gaussian_size:
        np.testing.assert_allclose(action, head.numpy(), atol=1e-5)
    else:
        best = [part.argmax(dim=1).numpy() for part in head.split(list(SPECS[name].categories), dim=1)]
        np.testing.assert_array_equal(action, np.stack(best, axis=1))


@pytest.mark.parametrize("name", SPECS)
def test_batch_invariant_actor_gives_the_same_bits_at_any_batch_size(name: str) -> None:
    _, actor = make(name, batch_invariant=True)
    obs = observations(64)
    noise = actor.draw(np.random.default_rng(0), 64)
    together = actor.act(obs, noise)
    log_prob = actor.log_prob(together.head, together.action)
    for row in range(64):
        alone = actor.act(obs[row : row + 1], noise[row : row + 1])
        np.testing.assert_array_equal(together.action[row], alone.action[0])
        assert log_prob[row] == actor.log_prob(alone.head, alone.action)[0]


@pytest.mark.parametrize("name", SPECS)
def test_one_at_a_time_gives_the_same_bits_however_often_it_is_asked(name: str) -> None:
    _, actor = make(name, batch_invariant=True)
    obs = np.concatenate([observations(8)] * 3)
    noise = actor.draw(np.random.default_rng(0), len(obs))
    for scale in (1.0, 0.5):  # with other weights nothing may be left of the first ones
        actor.load(actor.weights * np.float32(scale))
        together, single, head = actor.act(obs, noise), actor.single(), np.zeros(actor.head_size, np.float32)
        for row in range(len(obs)):
            action = single(obs[row], noise[row], head)
            assert np.asarray(action).dtype == together.action.dtype
            np.testing.assert_array_equal(action, together.action[row])
            np.testing.assert_array_equal(head, together.head[row])


@pytest.mark.parametrize("name", SPECS)
def test_travels_and_takes_new_weights(name: str) -> None:
    _, actor = make(name)
    copy = pickle.loads(pickle.dumps(actor))
    obs, noise = observations(1), actor.draw(np.random.default_rng(0), 1)
    assert log_prob(copy, obs, noise) == log_prob(actor, obs, noise)
    copy.load(np.zeros_like(actor.weights))
    assert log_prob(copy, obs, noise) != log_prob(actor, obs, noise)


def log_prob(actor: MLPActor, obs: FloatArray, noise: FloatArray) -> float:
    decision = actor.act(obs, noise)
    return float(actor.log_prob(decision.head, decision.action)[0])


@pytest.mark.parametrize("name", SPECS)
def test_noise_drawn_in_parts_is_the_same_noise(name: str) -> None:
    _, actor = make(name)
    whole, parts = np.random.default_rng(4), np.random.default_rng(4)
    drawn = [actor.draw(parts, num_steps) for num_steps in (1, 7, 3, 64, 2)]
    np.testing.assert_array_equal(actor.draw(whole, 77), np.concatenate(drawn))


def test_restore_refuses_arrays_that_do_not_fit() -> None:
    _, actor = make("discrete")
    restored = MLPActor.restore(actor.arrays, actor.describe())
    np.testing.assert_array_equal(restored.weights, actor.weights)
    with pytest.raises(UserError, match="do not fit"):
        MLPActor.restore({**actor.arrays, "0.bias": np.zeros(3)}, actor.describe())
    with pytest.raises(UserError, match="kind"):
        MLPActor.restore(actor.arrays, {**actor.describe(), "kind": "transformer"})
