"""The policy with a memory that workers run computes what torch computes, for one observation and for many."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.numpy_actors import restore_numpy
from freerun.algorithms.policies.numpy_memory import GRU, LSTM, MemoryKind
from freerun.algorithms.policies.recurrent_networks import RecurrentActorCritic
from freerun.collecting.env_args_channel import EnvArgsChannel, with_env_args
from freerun.core import FloatArray, UserError, as_memory_policy, empty_memory

KINDS: list[MemoryKind] = ["gru", "lstm"]
SPECS = {
    "discrete": ActorSpec(5, (16,), "tanh", (3,), 0, True),
    "gaussian": ActorSpec(5, (16, 8), "relu", (), 2, False),
    "masked, with a critic's group": ActorSpec(5, (16,), "tanh", (3, 2), 0, True, critic_obs_size=4, has_mask=True),
}
NUM_STEPS, NUM_ENVS, SIZE = 7, 4, 6


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def column(*numbers: float) -> FloatArray:
    return np.array(numbers, np.float32)[:, None]


def test_a_gru_of_one_unit_by_hand() -> None:
    cell = GRU(1, 1)
    weights = {"weight_ih_l0": column(0.5, -1.0, 2.0), "weight_hh_l0": column(1.0, 0.25, -0.5)}
    biases = {"bias_ih_l0": column(0.1, 0.2, 0.3)[:, 0], "bias_hh_l0": column(0.0, -0.4, 0.6)[:, 0]}
    cell.load({**weights, **biases})
    memory = np.array([0.8], np.float32)
    gates = cell.joined.dot(np.array([1.5, 0.8, 1.0], np.float32))
    cell.bind(gates, memory)()
    reset = sigmoid(0.5 * 1.5 + 1.0 * 0.8 + 0.1)
    keep = sigmoid(-1.0 * 1.5 + 0.25 * 0.8 + 0.2 - 0.4)
    new = math.tanh(2.0 * 1.5 + 0.3 + reset * (-0.5 * 0.8 + 0.6))
    assert memory[0] == pytest.approx((1 - keep) * new + keep * 0.8, rel=1e-6)


def test_an_lstm_of_one_unit_by_hand() -> None:
    cell = LSTM(1, 1)
    weights = {"weight_ih_l0": column(0.5, -1.0, 2.0, 0.3), "weight_hh_l0": column(1.0, 0.25, -0.5, 0.7)}
    biases = {"bias_ih_l0": column(0.1, 0.2, 0.3, 0.4)[:, 0], "bias_hh_l0": column(0.0, -0.4, 0.6, 0.0)[:, 0]}
    cell.load({**weights, **biases})
    memory = np.array([0.8, -0.3], np.float32)  # the output and the cell's state
    gates = cell.joined.dot(np.array([1.5, 0.8, 1.0], np.float32))
    cell.bind(gates, memory)()
    write, keep = sigmoid(0.5 * 1.5 + 1.0 * 0.8 + 0.1), sigmoid(-1.0 * 1.5 + 0.25 * 0.8 - 0.2)
    new, show = math.tanh(2.0 * 1.5 - 0.5 * 0.8 + 0.9), sigmoid(0.3 * 1.5 + 0.7 * 0.8 + 0.4)
    state = keep * -0.3 + write * new
    np.testing.assert_allclose(memory, [show * math.tanh(state), state], rtol=1e-6)


def make(kind: MemoryKind, name: str, batch_invariant: bool = False) -> tuple[RecurrentActorCritic, MemoryActor]:
    spec = SPECS[name]
    torch.manual_seed(3)
    net = RecurrentActorCritic(spec, kind, SIZE)
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if spec.normalize_obs:
        net.obs_mean[: spec.obs_size] = torch.linspace(-1, 1, spec.obs_size)
        net.obs_scale[: spec.obs_size] = torch.linspace(0.5, 2, spec.obs_size)
    actor = MemoryActor(spec, kind, SIZE, len(spec.categories) == 1, batch_invariant)
    net.export(actor)
    return net, actor


def observations(net: RecurrentActorCritic) -> FloatArray:
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((NUM_STEPS, NUM_ENVS, net.row_size)).astype(np.float32)
    if net.spec.has_mask:
        obs[..., -net.spec.output_size :] = rng.random((NUM_STEPS, NUM_ENVS, net.spec.output_size)) < 0.7
        obs[..., [-5, -2]] = 1  # something is always allowed
    return obs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_actions_and_memory_are_those_of_torch(kind: MemoryKind, name: str) -> None:
    net, actor = make(kind, name)
    obs = observations(net)
    memory = empty_memory(actor, NUM_ENVS)
    assert memory is not None
    normalized = net.normalize(torch.from_numpy(obs))
    with torch.no_grad():
        remembered, after = net.unroll(normalized, torch.zeros(NUM_ENVS, actor.memory_size))
        outputs = [net.head(torch.cat(pair, dim=1)).numpy() for pair in zip(normalized, remembered, strict=True)]
    for step, output in enumerate(outputs):
        decision = actor.act_from(obs[step], None, memory)
        chosen = decision.action if net.spec.gaussian_size else decision.head
        np.testing.assert_allclose(chosen, output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(memory, after.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_one_row_and_many_are_the_same_to_the_last_bit_where_that_is_asked_for(kind: MemoryKind, name: str) -> None:
    net, actor = make(kind, name, batch_invariant=True)
    obs, rng = observations(net), np.random.default_rng(1)
    together = np.zeros((NUM_ENVS, actor.memory_size), np.float32)
    alone = together.copy()
    singles = [actor.single_from(memory) for memory in alone]
    for step in range(NUM_STEPS):
        noise = actor.draw(rng, NUM_ENVS)
        decision = actor.act_from(obs[step], noise, together)
        for row, act in enumerate(singles):
            head = np.zeros(actor.head_size, np.float32)
            action = act(obs[step, row], noise[row], head)
            np.testing.assert_array_equal(action, decision.action[row])
            np.testing.assert_array_equal(head, decision.head[row])
    np.testing.assert_array_equal(alone, together)


def test_without_a_memory_to_go_on_from_it_acts_as_when_an_episode_begins() -> None:
    net, actor = make("gru", "discrete")
    obs, head = observations(net)[0], np.zeros(3, np.float32)
    single, noise = actor.single(), np.zeros(3, np.float32)
    expected = actor.act_from(obs, None, np.zeros((NUM_ENVS, SIZE), np.float32)).head
    np.testing.assert_array_equal(actor.act(obs, None).head, expected)
    for row in (2, 1, 2):
        single(obs[row], noise, head)
        np.testing.assert_allclose(head, expected[row], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_pickled_and_restored_with_its_weights(kind: MemoryKind) -> None:
    net, actor = make(kind, "discrete")
    obs = observations(net)[0]
    for copy in (pickle.loads(pickle.dumps(actor)), restore_numpy(actor.arrays, actor.describe())):
        assert as_memory_policy(copy) is not None
        np.testing.assert_array_equal(copy.act(obs, None).head, actor.act(obs, None).head)
    wrong: list[dict[str, Any]] = [{"memory": "elman"}, {"memory_size": 0}, {"memory_size": 10**15}]
    for change in wrong:
        with pytest.raises(UserError, match=r"does not know|do not fit its description"):
            restore_numpy(actor.arrays, {**actor.describe(), **change})


def test_only_policies_with_a_memory_have_one() -> None:
    assert empty_memory(MLPActor(SPECS["discrete"], scalar_actions=True), 2) is None
    # A policy that wraps another one, for changed arguments of environments, has its memory.
    memory = empty_memory(with_env_args(make("lstm", "discrete")[1], EnvArgsChannel()), 2)
    assert memory is not None
    assert memory.shape == (2, 2 * SIZE)
