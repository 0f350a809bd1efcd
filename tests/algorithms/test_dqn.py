"""DQN: values by hand, both learners against each other, exploration, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import freerun
from freerun.algorithms.dqn.dqn import DQN
from freerun.algorithms.dqn.dqn_config import DQNConfig, scaled_defaults
from freerun.algorithms.learners.fast_learner import Learner
from freerun.algorithms.policies.action_heads import MASKED_LOGIT
from freerun.algorithms.policies.epsilon_greedy import EpsilonGreedy
from freerun.algorithms.policies.mlp_actor import MLPActor
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.core import EnvSpec, ObsGroups, RunScale, Segment, UserError, mask_space
from freerun.tools.cli.main import main

ENV = EnvSpec(spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3))
LINEAR: dict[str, Any] = {"hidden_sizes": (2,), "gamma": 0.5, "num_return_steps": 1, "learning_starts": 0}
NUM_STEPS = 200
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
LEARNERS = [("fast", "cpu"), ("torch", "cpu"), pytest.param("torch", "cuda", marks=NEEDS_GPU)]
"""Who computes gradients, and where."""


def with_values(algorithm: DQN, online: list[float], target: list[float]) -> DQN:
    """Both networks put out these numbers for every observation: their last biases, behind weights of 0."""
    nets = algorithm.agent.networks
    for weights, outputs in ((nets.weights, online), (nets.target_weights, target)):
        weights.data.zero_()
        weights.data[-len(outputs) :] = torch.tensor(outputs)
    return algorithm


def step(action: int, reward: float, terminated: float = 0.0) -> StepBatch:
    return StepBatch(
        torch.zeros(1, 2),
        torch.tensor([[float(action)]]),
        torch.tensor([reward]),
        torch.full((1, 2), torch.nan if terminated else 0.0),
        torch.tensor([terminated]),
    )


def on(device: str, steps: StepBatch) -> StepBatch:
    return StepBatch(*(column.to(device) for column in steps))


def whole(steps: StepBatch) -> ReplaySample:
    """All steps, as if they had been drawn from a buffer."""
    return ReplaySample(steps, torch.ones_like(steps.reward), torch.arange(len(steps.reward), device=steps.obs.device))


def test_values_and_targets_by_hand() -> None:
    # Q = V + A - mean A: the network says 2 + (1, 4, 1) - 2 = (1, 4, 1), the target network 1 + (3, 0, 6) - 3.
    algorithm = with_values(DQN(ENV, DQNConfig(**LINEAR), 0, "cpu", False), [2.0, 1.0, 4.0, 1.0], [1.0, 3.0, 0.0, 6.0])
    nets = algorithm.agent.networks
    obs = torch.zeros(1, 2)
    assert nets.values(nets.online(obs)).tolist() == [[1.0, 4.0, 1.0]]
    assert nets.values(nets.target(obs)).tolist() == [[1.0, -2.0, 4.0]]
    # Double: the network prefers action 1, which the target network rates -2. y = 1 + 0.5 * -2 = 0
    assert nets.targets(step(0, 1.0)).tolist() == [0.0]
    assert algorithm.agent.td_error(step(0, 1.0)).tolist() == [1.0]
    # Nothing follows, whatever the observation: y = 3
    assert nets.targets(step(0, 3.0, terminated=1.0)).tolist() == [3.0]
    # Of two steps, gamma = 0.5 counts twice: terminated is 1 - 0.5. y = 1 + 0.25 * -2 = 0.5
    assert nets.targets(step(0, 1.0, terminated=0.5)._replace(next_obs=obs)).tolist() == [0.5]
    single = with_values(
        DQN(ENV, DQNConfig(**LINEAR, double=False, duelling=False), 0, "cpu", False), [1.0, 4.0, 1.0], [1.0, -2.0, 4.0]
    )
    # The target network prefers action 2, which it rates 4. y = 1 + 0.5 * 4 = 3
    assert single.agent.networks.targets(step(0, 1.0)).tolist() == [3.0]


@pytest.mark.parametrize("learner", ["fast", "torch"])
def test_the_loss_by_hand(learner: Learner) -> None:
    config = DQNConfig(**LINEAR, learner=learner, duelling=False, huber_delta=1.0)
    algorithm = with_values(DQN(ENV, config, 0, "cpu", False), [1.0, 4.0, 1.0], [0.0, 0.0, 0.0])
    both = StepBatch(*(torch.cat(pair) for pair in zip(step(0, 0.5), step(1, 0.0), strict=True)))
    td_error = algorithm.agent.learn(ReplaySample(both, torch.tensor([1.0, 0.5]), torch.arange(2)))
    # TD errors 1 - 0.5 and 4 - 0: huber gives 0.125 and 3.5, weighed 1 and 0.5, so the mean is (0.125 + 1.75) / 2.
    assert td_error.tolist() == [0.5, 4.0]
    metrics = algorithm.agent.metrics()
    assert metrics["critic_loss"] == pytest.approx(0.9375)
    assert metrics["q_mean"] == pytest.approx(2.5)
    # dJ/dQ = w * clip(error) / 2: 0.25 for the first action and 0.25 for the second, whose biases are the last weights.
    gradient = algorithm.agent.networks.weights.grad
    assert gradient is not None
    assert gradient[-3:].tolist() == pytest.approx([0.25, 0.25, 0.0])


@pytest.mark.parametrize(("rate", "interval", "expected"), [(1.0, 3, [0, 0, 1, 1, 1]), (0.5, 2, [0, 0.5, 0.5, 0.75])])
def test_the_target_network_follows(rate: float, interval: int, expected: list[float]) -> None:
    config = DQNConfig(**LINEAR, target_rate=rate, target_interval=interval)
    nets = DQN(ENV, config, 0, "cpu", False).agent.networks
    nets.weights.data.fill_(1.0)
    nets.target_weights.zero_()
    found = []
    for _ in expected:
        nets.follow()
        found.append(nets.target_weights[0].item())
    assert found == expected


def test_weights_begin_small() -> None:
    """As those of torch.nn.Linear: larger ones made values less stable than Stable-Baselines3's."""
    nets = DQN(ENV, DQNConfig(hidden_sizes=(64, 64)), 0, "cpu", False).agent.networks
    for layer in nets.online:
        if isinstance(layer, torch.nn.Linear):
            limit = 1 / math.sqrt(layer.in_features)
            assert 0.8 * limit < layer.weight.abs().max().item() <= limit


# ---------------------------------------------------------------------------------------------- masks


MASKED_ENV = EnvSpec.of_groups(
    ObsGroups(ENV.observation_space, mask=mask_space(ENV.action_space)), ENV.action_space, reports_final_obs=True
)


def masked_step(next_mask: list[float], terminated: float = 0.0) -> StepBatch:
    """A step whose next observation ends with this mask."""
    return step(0, 1.0, terminated)._replace(
        obs=torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0]]), next_obs=torch.tensor([[0.0, 0.0, *next_mask]])
    )


@pytest.mark.parametrize(("learner", "device"), LEARNERS)
def test_targets_take_the_best_of_what_is_allowed_by_hand(learner: Learner, device: str) -> None:
    # The network says (1, 4, 2), the target network (1, -2, 3). y = 1 + 0.5 * Q_target(s', a')
    cases: list[tuple[list[float], float, float]] = [
        ([1.0, 1.0, 1.0], 0.0, 0.0),  # action 1 is best, and rated -2
        ([1.0, 0.0, 1.0], 0.0, 2.5),  # of 0 and 2 it is 2, rated 3
        ([1.0, 0.0, 0.0], 0.0, 1.5),  # 0 alone, rated 1
        ([0.0, 0.0, 0.0], 0.0, 0.0),  # the end of an episode that was truncated and has no mask: as if all were allowed
        ([0.0, 0.0, 0.0], 1.0, 1.0),  # nothing follows
    ]
    for next_mask, terminated, expected in cases:
        config = DQNConfig(**LINEAR, learner=learner, duelling=False)
        algorithm = with_values(DQN(MASKED_ENV, config, 0, device, False), [1.0, 4.0, 2.0], [1.0, -2.0, 3.0])
        steps = on(device, masked_step(next_mask, terminated))
        assert algorithm.agent.networks.targets(steps).tolist() == [expected]
        # Q(s, 0) = 1, and the learner returns 1 - y
        td_error = algorithm.agent.learn(whole(steps))
        assert td_error.tolist() == [1.0 - expected]


def test_the_policy_explores_and_chooses_among_what_is_allowed_by_hand() -> None:
    config = DQNConfig(hidden_sizes=(2,), epsilon_start=0.5, duelling=False)
    algorithm = with_values(DQN(MASKED_ENV, config, 0, "cpu", False), [1.0, 4.0, 2.0], [0.0] * 3)
    algorithm.load_state_dict(algorithm.state_dict())  # which tells the policy of the values
    mask = [1.0, 0.0, 1.0]
    obs = np.array([[0.0, 0.0, *mask]] * 4, np.float32)
    # u < 0.5 explores. Two choices are allowed: u below 0.5 takes the first of them, which is 0, and above the second.
    noise = np.array([[0.4, 0.0], [0.4, 0.49], [0.4, 0.5], [0.6, 0.0]], np.float32)
    expected = [0, 0, 2, 2]  # in the end the best that is allowed: 2, with the value 2
    for batch_invariant in (False, True):
        worker = MLPActor(algorithm.spec, scalar_actions=True, batch_invariant=batch_invariant)
        worker.load(algorithm.policy.weights)
        assert worker.act(obs, noise).action.tolist() == expected
        assert worker.act(obs, None).action.tolist() == [2] * 4
        act, head = worker.single(), np.zeros(3, np.float32)
        assert [int(act(obs[0], row, head)) for row in noise] == expected


def test_random_choices_among_many_that_are_allowed_are_even_in_both_ways() -> None:
    head, rng = EpsilonGreedy(7, has_mask=True), np.random.default_rng(0)
    head.epsilon = 1.0
    allowed = np.array([1, 0, 1, 1, 0, 1, 1], np.bool_)
    values = np.where(allowed, 0.0, MASKED_LOGIT).astype(np.float32)
    noise = head.draw(rng, 5000)
    together = head.decide(np.tile(values, (5000, 1)), noise).action
    assert np.bincount(together, minlength=7).tolist() == pytest.approx([1000, 0, 1000, 1000, 0, 1000, 1000], abs=120)
    act = head.single(lambda obs, output: np.copyto(output, values))
    output = np.zeros(7, np.float32)
    assert [int(act(values, row, output)) for row in noise] == together.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_the_policy_on_a_device_keeps_to_masks(device: str) -> None:
    config = DQNConfig(hidden_sizes=(2,), epsilon_start=0.3, duelling=False)
    algorithm = with_values(DQN(MASKED_ENV, config, 0, "cpu", False), [0.0, 9.0, 1.0], [0.0] * 3)
    algorithm.load_state_dict(algorithm.state_dict())
    rows = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0], device=device).expand(6000, 5)
    action, _ = algorithm.policy.on(torch.device(device), seed=0).act(rows)
    # The best allowed one, 2, with 0.7 + 0.3 / 2, and 0 with 0.3 / 2.
    assert torch.bincount(action, minlength=3).tolist() == pytest.approx([900, 0, 5100], abs=150)


def test_it_learns_the_best_of_what_is_allowed(run_dir: Path) -> None:
    """A random allowed choice is worth 1 on average, and the best of those that are allowed 1.33."""
    settings: dict[str, Any] = {"total_steps": 6000, "gamma": 0.0, "num_return_steps": 1, "hidden_sizes": (32,)}
    settings |= {"epsilon_steps": 2000, "learning_rate": 3e-3, "learning_starts": 200, "seed": 1}
    result = freerun.train("toy_envs:Masked", algo="dqn", mode="sequential", quiet=True, run_dir=run_dir, **settings)
    evaluation = freerun.evaluate(result.policy, episodes=100)
    assert sum(evaluation.returns) / sum(evaluation.lengths) > 1.25


# ---------------------------------------------------------------------------------------------- exploring


def test_epsilon_falls_with_the_steps_and_travels_with_the_weights() -> None:
    config = DQNConfig(epsilon_start=0.9, epsilon_end=0.1, epsilon_steps=400, learning_starts=0, steps_per_update=200)
    assert [config.epsilon_at(num) for num in (0, 200, 400, 900)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    algorithm = DQN(ENV, config, 0, "cpu", False)
    assert algorithm.policy.arrays["epsilon"] == pytest.approx(0.9)
    algorithm.observe([segment()])
    assert algorithm.update(0, 0.5)["epsilon"] == pytest.approx(0.5)
    worker = MLPActor(algorithm.spec, scalar_actions=True)
    worker.load(algorithm.policy.weights)
    noise = np.array([[0.49, 0.0], [0.49, 1.0], [0.49, 2.0], [0.51, 2.0]], np.float32)
    obs = np.ones((4, 2), np.float32)
    best = int(worker.act(obs, None).action[0])
    assert worker.act(obs, noise).action.tolist() == [0, 1, 2, best]
    act, head = worker.single(), np.zeros(3, np.float32)
    assert [act(obs[0], row, head) for row in noise] == [0, 1, 2, best]


def test_random_choices_are_even_and_do_not_depend_on_how_many_are_drawn() -> None:
    head = EpsilonGreedy(3)
    noise = head.draw(np.random.default_rng(0), 3000)
    assert np.bincount(noise[:, 1].astype(int)).tolist() == pytest.approx([1000] * 3, abs=100)
    rng = np.random.default_rng(0)
    parts = [head.draw(rng, num) for num in (1000, 999, 1001)]
    np.testing.assert_array_equal(noise, np.concatenate(parts))


@pytest.mark.parametrize("device", DEVICES)
def test_the_policy_on_a_device_explores_as_often(device: str) -> None:
    algorithm = with_values(
        DQN(ENV, DQNConfig(hidden_sizes=(2,), epsilon_start=0.3), 0, "cpu", False), [0.0, 0.0, 1.0, 0.0], [0.0] * 4
    )
    algorithm.load_state_dict(algorithm.state_dict())  # which tells the policy of the values
    action, log_prob = algorithm.policy.on(torch.device(device), seed=0).act(torch.zeros(6000, 2, device=device))
    # The best one with 0.7 + 0.3 / 3, each of the others with 0.3 / 3.
    assert torch.bincount(action).tolist() == pytest.approx([600, 4800, 600], abs=150)
    assert action.dtype == torch.int64
    assert not log_prob.any()


def test_many_tensor_environments_explore_for_longer() -> None:
    assert scaled_defaults(DQNConfig(), RunScale(num_envs=4096, is_tensors=True))["epsilon_steps"] == 409_600
    assert scaled_defaults(DQNConfig(), RunScale(num_envs=4096))["epsilon_steps"] == 10_000
    assert "epsilon_steps" not in scaled_defaults(DQNConfig(epsilon_steps=5), RunScale())


# ---------------------------------------------------------------------------------------------- both learners


def segment(has_mask: bool = False) -> Segment:
    rng = np.random.default_rng(7)
    obs = rng.normal(size=(NUM_STEPS, 1, 2)).astype(np.float32)
    if has_mask:
        obs = np.concatenate([obs, rng.random((NUM_STEPS, 1, 3)) < 0.6], axis=2, dtype=np.float32)
    column = (NUM_STEPS, 1)
    return Segment(
        obs=obs,
        action=rng.integers(0, 3, column),
        log_prob=np.zeros(column, np.float32),
        reward=rng.normal(size=column).astype(np.float32) * 3,
        terminated=rng.random(column) < 0.1,
        truncated=rng.random(column) < 0.1,
        next_obs=np.roll(obs, -1, axis=0),
        version=np.zeros(column, np.int64),
        episode=np.zeros(column, np.int64),
        seconds=0.0,
    )


def made(learner: Learner, has_mask: bool = False, device: str = "cpu", **settings: Any) -> DQN:
    """A learner with 200 steps in its buffer."""
    config = DQNConfig(**{"hidden_sizes": (16, 16), "batch_size": 20, "buffer_size": 300, **settings}, learner=learner)
    algorithm = DQN(MASKED_ENV if has_mask else ENV, config, 0, device, False)
    algorithm.observe([segment(has_mask)])
    return algorithm


def learned(algorithm: DQN) -> dict[str, Tensor]:
    state = algorithm.agent.state_dict()
    found = {name: state[name].clone() for name in ("online", "target")}
    return found | {name: value.clone() for name, value in state["optimizer"]["state"].get(0, {}).items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"double": False, "duelling": False, "num_return_steps": 1},
    "double alone": {"duelling": False, "activation": "tanh"},
    "masks": {"has_mask": True},
    "masks without double": {"has_mask": True, "double": False, "duelling": False},
    "prioritised": {"replay": "prioritised", "activation": "elu"},
    "hard copies and small gradients": {
        "target_rate": 1.0,
        "target_interval": 7,
        "max_grad_norm": 0.05,
        "huber_delta": 1.0,
    },
}
# learning_starts is above buffer_size by default
SETTINGS = {name: {"learning_starts": 0, "target_rate": 0.05, **settings} for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_fast_and_autograd_end_at_the_same_weights(settings: dict[str, Any]) -> None:
    fast, reference = (made(learner, **settings) for learner in ("fast", "torch"))
    before = learned(reference)
    for algorithm in (fast, reference):
        algorithm.take_gradient_steps(100)
    found, expected = learned(fast), learned(reference)
    for name, value in expected.items():
        if name in before:
            assert (value - before[name]).abs().max() > 1e-2, name  # far more than the two differ
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=name)
    assert fast.agent.metrics() == pytest.approx(reference.agent.metrics(), rel=1e-4, abs=1e-5)


def test_the_exported_policy_gives_the_values() -> None:
    algorithm = made("fast", learning_starts=0, steps_per_update=NUM_STEPS)
    algorithm.update(0, 0.0)
    obs = torch.randn(50, 2)
    nets = algorithm.agent.networks
    values = nets.values(nets.online(obs)).detach().numpy()
    decision = algorithm.policy.act(obs.numpy(), None)
    np.testing.assert_allclose(decision.head, values, atol=1e-5)
    np.testing.assert_array_equal(decision.action, decision.head.argmax(axis=1))


@pytest.mark.parametrize("learner", ["fast", "torch"])
def test_rewards_that_are_not_finite_change_nothing(learner: Learner) -> None:
    algorithm = made(learner, learning_starts=0)
    before = algorithm.agent.networks.weights.clone()
    bad = step(0, float("inf"))
    algorithm.agent.learn(ReplaySample(bad, torch.tensor([torch.nan]), torch.arange(1)))
    assert torch.equal(algorithm.agent.networks.weights, before)
    assert algorithm.agent.metrics()["bad_gradients"] == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_device_takes_the_steps_of_a_cpu(settings: dict[str, Any], device: str) -> None:
    """Ten steps on the same rows, outside of a captured graph."""
    found = []
    for place in ("cpu", device):
        algorithm = made("torch", device=place, **settings)
        sample = whole(algorithm.steps_of(segment(settings.get("has_mask", False))))
        td_error = [algorithm.agent.learn(sample) for _ in range(10)][-1]
        found.append({**learned(algorithm), "td_error": td_error})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)


@NEEDS_GPU
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_recorded_step_is_the_eager_step(settings: dict[str, Any]) -> None:
    found = []
    for acceleration in ("none", "graph"):
        algorithm = made("torch", device="cuda", acceleration=acceleration, **settings)
        algorithm.take_gradient_steps(100)
        found.append(learned(algorithm))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon_end": 1.5}, "--epsilon-start and --epsilon-end must lie between 0 and 1"),
        ({"epsilon_steps": 0}, "--epsilon-steps must be at least 1"),
        ({"target_interval": 0}, "--target-interval must be at least 1"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm and --huber-delta must be above 0"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DQNConfig(**settings)


def test_other_actions_are_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "Pendulum-v1", "--algo", "dqn"]) == 2
    assert "--algo dqn needs actions in a Discrete, not Box(" in capsys.readouterr().err
    with pytest.raises(UserError, match="needs Discrete actions, not MultiDiscrete"):
        DQN(EnvSpec(ENV.observation_space, spaces.MultiDiscrete([2, 2])), DQNConfig(), 0, "cpu", False)


@pytest.mark.parametrize("device", DEVICES)
def test_it_learns_a_task_of_one_step(device: str, run_dir: Path) -> None:
    """The action that equals the bit shown; actions are numbered from 5 on."""
    settings: dict[str, Any] = {"env_args": {"kind": "discrete"}, "hidden_sizes": (16,), "epsilon_steps": 500}
    freerun.train(
        "toy_envs:OneBit",
        algo="dqn",
        mode="sequential",
        total_steps=1500,
        learning_starts=100,
        learning_rate=3e-3,
        device=device,
        quiet=True,
        run_dir=run_dir,
        **settings,
    )
    policy = freerun.load_policy(run_dir)
    assert [int(policy.predict(np.array(obs))) for obs in ([1.0, 0.0], [0.0, 1.0])] == [6, 5]
