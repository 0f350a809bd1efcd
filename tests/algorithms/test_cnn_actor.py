"""Networks for images: the workers' numpy CNN against numbers worked out by hand, and against torch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.adapters.space_adapter import SpaceAdapter
from freerun.algorithms.policies.cnn_actor import CNNActor
from freerun.algorithms.policies.image_layers import (
    NATURE,
    SMALL,
    ConvLayer,
    chosen_network,
    output_size,
    padded,
    size_and_channels,
)
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import TrunkNetwork
from freerun.algorithms.policies.numpy_actors import restore_numpy
from freerun.algorithms.policies.torch_actor import TorchActor
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, ImagePart, UserError

ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "atari": ATARI,
    "colour": spaces.Box(0, 255, (41, 50, 3), np.uint8),
    "small": spaces.Box(0, 1, (9, 12, 2), np.uint8),
    "mixed": spaces.Dict(
        after=spaces.Box(-5, 5, (2,), np.float64),
        camera=spaces.Box(0, 255, (10, 11, 3), np.uint8),
        depth=spaces.Box(0, 255, (1, 12, 12), np.uint8),
        wheels=spaces.Discrete(3),
    ),
}
ACTIONS = {"discrete": spaces.Discrete(6), "box": spaces.Box(-1, 1, (2,), np.float32)}


def algorithm(space: spaces.Space[Any], actions: Any = ACTIONS["discrete"], **settings: Any) -> tuple[PPO, Any]:
    adapter = SpaceAdapter(space, actions)
    deterministic = settings.pop("deterministic", False)
    made = PPO(adapter.spec, PPOConfig(**settings), seed=3, device="cpu", deterministic=deterministic)
    space.seed(5)
    rows = np.stack([adapter.read(space.sample()) for _ in range(5)])
    # The first policy hardly depends on what it sees, and a test needs one that does.
    assert isinstance(made.net.actor, TrunkNetwork)
    for layer in made.net.actor.head:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.orthogonal_(layer.weight, 0.3)
    made.net.export(made.policy)
    return made, rows


# ---------------------------------------------------------------------------------------------- sizes


def test_every_pixel_is_seen() -> None:
    # Nature: (84 - 8) / 4 + 1 = 20, (20 - 4) / 2 + 1 = 9, (9 - 3) / 1 + 1 = 7, without a remainder.
    assert (padded(84, NATURE.layers), output_size(84, NATURE.layers)) == (84, 7)
    # 36 is the smallest: 8, 3, 1. Of 37 pixels the last would be seen by none, so it grows by a stride of 8.
    assert (padded(36, NATURE.layers), output_size(36, NATURE.layers)) == (36, 1)
    assert (padded(37, NATURE.layers), output_size(37, NATURE.layers)) == (44, 2)
    # Two layers of stride 1 and 2: 16 -> 14 leaves a remainder, 17 -> 15 -> 7 does not.
    assert (padded(16, SMALL.layers), output_size(16, SMALL.layers)) == (17, 7)
    assert padded(1, (ConvLayer(1, 3, 1),)) == 3


@pytest.mark.parametrize(
    ("shape", "network", "expected"),
    [
        ((4, 84, 84), None, "nature"),
        ((210, 160, 3), "auto", "nature"),
        ((36, 35, 3), None, "small-cnn"),
        ((4, 84, 84), "impala", "impala"),
        ((4, 84, 84), "mlp", None),
        ((4, 84, 84), "my_networks:cnn", "my_networks:cnn"),
    ],
)
def test_the_network_follows_from_the_observations(
    shape: tuple[int, ...], network: str | None, expected: str | None
) -> None:
    env = SpaceAdapter(spaces.Box(0, 255, shape, np.uint8), ACTIONS["discrete"]).spec
    assert chosen_network(network, env) == expected


def test_a_network_for_images_is_refused_where_there_are_none() -> None:
    env = EnvSpec(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
    assert chosen_network(None, env) is None
    with pytest.raises(UserError, match="--network nature is for images, and this environment has none"):
        chosen_network("nature", env)


def test_images_are_found_within_other_observations() -> None:
    spec = SpaceAdapter(OBSERVATIONS["mixed"], ACTIONS["discrete"]).spec
    # Gymnasium orders a Dict by its keys: 2 numbers, 10 * 11 * 3 pixels, 12 * 12 pixels, and 3 bits of the Discrete.
    assert spec.images == (ImagePart(2, (10, 11, 3), 255.0), ImagePart(332, (1, 12, 12), 255.0))
    assert spec.observation_space.shape == (2 + 330 + 144 + 3,)
    assert SpaceAdapter(OBSERVATIONS["small"], ACTIONS["box"]).spec.images == (ImagePart(0, (9, 12, 2), 1.0),)
    # A stack of pictures that have channels of their own is not taken for a picture.
    assert SpaceAdapter(spaces.Box(0, 255, (4, 8, 8, 3), np.uint8), ACTIONS["box"]).spec.images == ()


# ---------------------------------------------------------------------------------------------- numbers


def test_a_convolution_is_what_it_is_on_paper() -> None:
    image = ImagePart(0, (3, 3, 1), 10.0)
    spec = ActorSpec.of(EnvSpec(spaces.Box(0, 10, (3, 3, 1), np.uint8), spaces.Discrete(2)), (), "tanh")
    actor = CNNActor(spec, (image,), "small-cnn", scalar_actions=True)
    weights = {name: np.zeros(array.shape, np.float32) for name, array in actor.arrays.items()}
    # 3 x 3 pixels are padded to 5 x 5, which the first layer turns into 3 x 3 and the second into one number.
    # The first layer's channel 0 takes each pixel at the upper left corner of its kernel, twice; channel 1 is ReLU(-5).
    weights["trunk.encoders.0.convolutions.0.weight"][0, 0, 0, 0] = 2.0
    weights["trunk.encoders.0.convolutions.0.bias"][1] = -5.0
    # The second one sums the middle row of channel 0, weighed 1, 10, 100, and adds 0.5 and channel 1, which is 0.
    weights["trunk.encoders.0.convolutions.1.weight"][0, 0, 1] = 1.0, 10.0, 100.0
    weights["trunk.encoders.0.convolutions.1.weight"][0, 1] = 7.0
    weights["trunk.encoders.0.convolutions.1.bias"][0] = 0.5
    weights["trunk.encoders.0.linear.weight"][3, 0] = 1.0
    weights["head.0.weight"][1, 3] = -1.0
    weights["head.0.bias"][0] = 0.25
    actor.load(np.concatenate([weights[name].reshape(-1) for name in actor.arrays]))
    picture = np.array([[[[9], [9], [9]], [[1], [2], [3]], [[9], [9], [9]]]], np.uint8)
    # 2 * (0.1, 0.2, 0.3), weighed 1, 10, 100: 0.2 + 4 + 60 = 64.2, and 0.5 more.
    decision = actor.act(picture, None)
    np.testing.assert_allclose(decision.head, [[0.25, -64.7]], rtol=1e-6)
    assert decision.action.tolist() == [0]


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("network", ["auto", "impala"])
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_workers_compute_what_the_learner_computes(kind: str, network: str, normalize_obs: bool, actions: str) -> None:
    made, rows = algorithm(OBSERVATIONS[kind], ACTIONS[actions], network=network, normalize_obs=normalize_obs)
    assert isinstance(made.policy, TorchActor if network == "impala" else CNNActor)
    actor = pickle.loads(pickle.dumps(made.policy))
    noise = actor.draw(np.random.default_rng(1), len(rows))
    decision = actor.act(rows, noise)
    with torch.no_grad():
        obs = made.net.normalize(torch.from_numpy(rows).flatten(1))
        head, value = made.net.head_and_value(obs)
        assert torch.equal(head, made.net.head(obs))
        assert torch.equal(value, made.net.value(obs))
        expected = made.net.log_prob(head, torch.from_numpy(decision.action))
    assert head.std() > 0.001, "what is seen must make a difference"
    np.testing.assert_allclose(actor.log_prob(decision.head, decision.action), expected.numpy(), atol=1e-5)
    act, one_head = actor.single(), np.zeros(actor.head_size, np.float32)
    action = act(rows[0], noise[0], one_head)
    np.testing.assert_allclose(one_head, decision.head[0], atol=1e-5)
    np.testing.assert_allclose(action, decision.action[0], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "size_and_number"),
    [
        ((84, 84, 3), (84, 84, 3)),
        ((4, 84, 84), (84, 84, 4)),
        ((210, 160, 3), (210, 160, 3)),
        ((3, 210, 160), (210, 160, 3)),
        ((8, 8, 111), (8, 8, 111)),  # a chess board has more planes than squares on a side
        ((111, 8, 8), (8, 8, 111)),
        ((5, 5, 5), (5, 5, 5)),
    ],
)
def test_which_size_of_an_image_is_that_of_its_channels(
    shape: tuple[int, int, int], size_and_number: tuple[int, int, int]
) -> None:
    assert size_and_channels(shape) == size_and_number


def test_channels_first_or_last_makes_no_difference() -> None:
    first, rows = algorithm(spaces.Box(0, 255, (3, 40, 44), np.uint8))
    last, _ = algorithm(spaces.Box(0, 255, (40, 44, 3), np.uint8))
    last.policy.load(first.policy.weights)
    heads = first.policy.act(rows, None).head, last.policy.act(rows.transpose(0, 2, 3, 1), None).head
    np.testing.assert_array_equal(*heads)


def test_an_action_does_not_depend_on_how_many_share_the_call() -> None:
    made, rows = algorithm(OBSERVATIONS["mixed"], deterministic=True)
    together = made.policy.act(rows, None).head
    alone = np.concatenate([made.policy.act(rows[row : row + 1], None).head for row in range(len(rows))])
    single = np.zeros_like(together)
    for row, head in zip(rows, single, strict=True):
        made.policy.single()(row, made.policy.draw(np.random.default_rng(0), 1)[0], head)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, single)


def test_a_policy_is_restored_from_its_description() -> None:
    made, rows = algorithm(OBSERVATIONS["mixed"], normalize_obs=True)
    assert isinstance(made.policy, CNNActor)
    restored = restore_numpy(dict(made.policy.arrays), made.policy.describe())
    np.testing.assert_array_equal(restored.act(rows, None).head, made.policy.act(rows, None).head)
    assert restored.fits(SpaceAdapter(OBSERVATIONS["mixed"], ACTIONS["discrete"]).spec)
    assert not restored.fits(SpaceAdapter(OBSERVATIONS["small"], ACTIONS["discrete"]).spec)
    with pytest.raises(UserError, match="does not know: 'resnet'"):
        restore_numpy(dict(made.policy.arrays), {**made.policy.describe(), "network": "resnet"})
    with pytest.raises(UserError, match="do not fit its description"):
        restore_numpy({**made.policy.arrays, "head.0.bias": np.zeros(1, np.float32)}, made.policy.describe())


def test_an_mlp_is_there_for_who_asks_for_it() -> None:
    env = SpaceAdapter(OBSERVATIONS["small"], ACTIONS["discrete"]).spec
    made = PPO(env, PPOConfig(network="mlp"), seed=0, device="cpu", deterministic=False)
    assert isinstance(made.policy, MLPActor)
