"""SAC: its targets worked out by hand, its pace, and a problem that it must solve in seconds."""

from __future__ import annotations

import json
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from freerun.algorithms.mbpo.mbpo import MBPO
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import squashed_sample
from freerun.algorithms.sac.off_policy import UpdateBudget
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_agent import SoftAgent
from freerun.algorithms.sac.soft_networks import critic_values
from freerun.core import Acceleration, EnvSpec, Segment, UserError
from freerun.cuda_graphs import GraphedStep
from freerun.experiment import run
from freerun.settings.registry import make_config

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=NEEDS_GPU)]


def env_spec(obs_size: int = 2, low: tuple[float, ...] = (-1.0,), high: tuple[float, ...] = (3.0,)) -> EnvSpec:
    box = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    return EnvSpec(spaces.Box(-np.inf, np.inf, (obs_size,), np.float32), box)


def segment(num_steps: int, action: float = 1.0, seed: int = 0) -> Segment:
    rng = np.random.default_rng(seed)
    shape = (num_steps, 1)
    return Segment(
        obs=rng.normal(size=(*shape, 2)).astype(np.float32),
        action=np.full((*shape, 1), action, np.float32),
        log_prob=np.zeros(shape, np.float32),
        reward=np.ones(shape, np.float32),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.zeros(shape, np.bool_),
        next_obs=rng.normal(size=(*shape, 2)).astype(np.float32),
        version=np.zeros(shape, np.int64),
        episode=np.zeros(shape, np.int64),
        seconds=0.0,
    )


class Aim(gymnasium.Env[Any, Any]):
    """One step: the nearer the action to three times the observation, the better; the best return is 0."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-5, 5, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._obs = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._obs, -abs(float(action[0] - 3 * self._obs[0])), True, False, {}


def test_it_learns_to_aim() -> None:
    config = make_config(
        {
            "env": Aim,
            "algo": "sac",
            "mode": "sequential",
            "total_steps": 1500,
            "hidden_sizes": (32, 32),
            "learning_rate": 3e-3,
            "learning_starts": 200,
            "eval_every": 1500,
            "eval_episodes": 50,
            "batch_size": 64,
            "quiet": True,
        }
    )
    result = run(config)
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert result.summary["mean_return"] > -2.5  # a policy that knows nothing gets about -2.9
    assert json.loads(lines[-1])["eval_return"] > -0.4


def test_the_numpy_actor_is_the_torch_policy() -> None:
    spec = ActorSpec.squashed(env_spec(), (16, 16), "relu")
    agent, actor = SoftAgent(spec, SACConfig(hidden_sizes=(16, 16)), 3, CPU), MLPActor(spec, scalar_actions=False)
    with torch.no_grad():
        agent.weights.mul_(3)  # away from the flat start
    agent.export(actor)
    rng = np.random.default_rng(0)
    obs, noise = rng.normal(size=(64, 2)).astype(np.float32), actor.draw(rng, 64)
    decision = actor.act(obs, noise)
    with torch.no_grad():
        mean, log_std = agent.networks.policy.net(torch.from_numpy(obs)).chunk(2, dim=1)
        action, log_prob = squashed_sample(mean, log_std, torch.from_numpy(noise))
    np.testing.assert_allclose(decision.action, 1 + 2 * action.numpy(), atol=1e-5)  # the range is [-1, 3]
    # The actions are twice as far apart as those in [-1, 1], so half as dense.
    expected = log_prob.numpy() - math.log(2)
    np.testing.assert_allclose(actor.log_prob(decision.head, decision.action), expected, atol=1e-3)
    single, head = actor.single(), np.zeros(actor.head_size, np.float32)
    for row in range(64):
        np.testing.assert_allclose(single(obs[row], noise[row], head), decision.action[row], atol=1e-6)
        np.testing.assert_allclose(head, decision.head[row], atol=1e-6)


def test_an_untrained_policy_spreads_its_actions_over_the_range() -> None:
    spec = ActorSpec.squashed(env_spec(), (16, 16), "relu")
    agent, actor = SoftAgent(spec, SACConfig(hidden_sizes=(16, 16)), 0, CPU), MLPActor(spec, scalar_actions=False)
    agent.export(actor)
    rng = np.random.default_rng(0)
    action = actor.act(rng.normal(size=(20_000, 2)).astype(np.float32), actor.draw(rng, 20_000)).action
    shares, _ = np.histogram(action, bins=8, range=(-1, 3))
    assert action.min() >= -1
    assert action.max() <= 3
    assert (np.abs(shares / 20_000 - 1 / 8) < 0.06).all()


def test_what_the_critics_should_say() -> None:
    spec = ActorSpec.squashed(env_spec(), (8,), "relu")
    agent = SoftAgent(spec, SACConfig(hidden_sizes=(8,), gamma=0.9), 0, CPU)
    for weight in agent.networks.target_critics.parameters():
        weight.data.zero_()
    agent.networks.target_critics.biases[-1].data[:, 0, 0] = torch.tensor([5.0, 4.0])  # the lower of the two counts
    steps = StepBatch(
        torch.zeros(2, 2), torch.zeros(2, 1), torch.tensor([1.0, 1.0]), torch.zeros(2, 2), torch.tensor([0.0, 1.0])
    )
    noise = torch.zeros(4, 1)
    _, _, target = agent.networks.critic_targets(steps, noise, 0.9)
    # Mean 0, deviation 1, no noise: log-probability −log √2π; temperature 1. What terminated is worth its reward.
    entropy_bonus = 0.5 * math.log(2 * math.pi)
    assert target.tolist() == pytest.approx([1 + 0.9 * (4 + entropy_bonus), 1.0], abs=1e-5)


def test_a_step_after_which_nothing_follows_is_worth_its_reward_whatever_it_led_to() -> None:
    agent = SoftAgent(ActorSpec.squashed(env_spec(), (8,), "relu"), SACConfig(hidden_sizes=(8,)), 0, CPU)
    next_obs = torch.full((1, 2), torch.nan)  # and 0 times NaN would be NaN
    steps = StepBatch(torch.zeros(1, 2), torch.zeros(1, 1), torch.tensor([2.0]), next_obs, torch.ones(1))
    _, _, target = agent.networks.critic_targets(steps, torch.zeros(2, 1), 0.99)
    assert target.tolist() == [2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(device: torch.device) -> None:
    """Not even what Adam remembers, so the next step is the one that would have been taken without it."""

    def learned(rewards: list[float]) -> SoftAgent:
        agent = SoftAgent(ActorSpec.squashed(env_spec(), (8,), "relu"), SACConfig(hidden_sizes=(8,)), 0, device)
        for reward in rewards:
            agent.generator.manual_seed(0)
            parts = torch.zeros(4, 2), torch.zeros(4, 1), torch.full((4,), reward), torch.zeros(4, 2), torch.zeros(4)
            rows = torch.arange(4, device=device)
            agent.learn(
                ReplaySample(StepBatch(*(part.to(device) for part in parts)), torch.ones(4, device=device), rows)
            )
        return agent

    spoilt = learned([1.0, torch.inf])
    before = learned([1.0])
    assert spoilt.metrics()["bad_gradients"] == 1  # the critics'; the actor's loss has no reward in it
    assert before.metrics()["bad_gradients"] == 0
    assert torch.equal(spoilt.state_dict()["critics"], before.state_dict()["critics"])
    for name, value in before.optimizers()["critic_optimizer"].state_dict()["state"][0].items():
        assert torch.equal(value, spoilt.optimizers()["critic_optimizer"].state_dict()["state"][0][name]), name
    assert spoilt.metrics() == {}  # counted since the last call


def test_twin_critics_in_one_are_two_critics() -> None:
    spec = ActorSpec.squashed(env_spec(), (8, 8), "relu")
    critics = SoftAgent(spec, SACConfig(hidden_sizes=(8, 8)), 0, CPU).networks.critics
    obs, action = torch.randn(5, 2), torch.randn(5, 1)
    both = critic_values(critics, obs, action)
    for number in range(2):
        x = torch.cat([obs, action], dim=1)
        for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = x @ weight[number] + bias[number]
            x = x.relu() if layer < 2 else x
        assert torch.allclose(both[number], x[:, 0], atol=1e-6)


def test_the_temperature_rises_where_entropy_lacks_and_falls_where_it_abounds() -> None:
    spec = ActorSpec.squashed(env_spec(), (8,), "relu")
    for target_entropy, sign in ((5.0, 1), (-5.0, -1)):
        agent = SoftAgent(spec, SACConfig(hidden_sizes=(8,), target_entropy=target_entropy), 0, CPU)
        steps = StepBatch(torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 2), torch.zeros(4))
        agent.learn(ReplaySample(steps, torch.ones(4), torch.arange(4)))
        assert math.copysign(1, agent.networks.policy.log_temperature.item()) == sign
        assert abs(agent.networks.policy.log_temperature.item()) == pytest.approx(3e-4, rel=1e-2)  # Adam's first step


def test_actions_are_stored_between_minus_one_and_one() -> None:
    algorithm = SAC(env_spec(), SACConfig(hidden_sizes=(8,)), 0, "cpu", False)
    algorithm.observe([segment(3, action=2.0)])
    assert algorithm.real_buffer.newest(3).action.tolist() == [[0.5]] * 3


@given(st.floats(0.01, 40), st.lists(st.integers(0, 300), max_size=30))
def test_a_budget_neither_loses_nor_invents_work(per_step: float, arrivals: list[int]) -> None:
    budget, total = UpdateBudget(per_step), 0
    for num_steps in arrivals:
        budget.earn(num_steps)
        total += budget.take()
    assert total == budget.done
    assert abs(total - per_step * sum(arrivals)) < 1 + 1e-3


def test_as_many_gradient_steps_as_declared_whatever_arrives() -> None:
    algorithm = SAC(
        env_spec(), SACConfig(hidden_sizes=(8,), updates_per_step=0.5, learning_starts=100), 0, "cpu", False
    )
    assert algorithm.demand().steps == 100
    assert not algorithm.demand().whole_episodes
    algorithm.observe([segment(100)])
    assert not algorithm.demand()
    metrics = algorithm.update(0, 0.0)
    assert metrics["agent_updates"] == 25  # of the first steps, no more than one update's 50 count
    for num_steps in (50, 77, 63):
        algorithm.observe([segment(num_steps)])
        metrics = algorithm.update(0, 0.0)
    assert metrics["agent_updates"] == 25 + 95
    assert metrics["real_data"] == 290


@pytest.mark.parametrize("kind", [SAC, MBPO])
def test_the_progress_of_the_run_anneals_the_correction_of_priorities(kind: type[SAC] | type[MBPO]) -> None:
    pace: dict[str, Any] = {"learning_starts": 0, "updates_per_step": 0.1, "model_updates_per_step": 0.1}
    config = MBPOConfig(hidden_sizes=(8,), model_hidden_sizes=(8,), replay="prioritised", **pace)
    algorithm = kind(env_spec(), config, 0, "cpu", False)
    algorithm.observe([segment(60)])
    algorithm.update(0, 0.75)
    assert algorithm.real_buffer.beta.item() == pytest.approx(0.4 + 0.75 * 0.6)


def test_a_restored_learner_goes_on_bit_for_bit() -> None:
    def make() -> SAC:
        return SAC(env_spec(), SACConfig(hidden_sizes=(8,), learning_starts=0, replay="prioritised"), 0, "cpu", False)

    first, second = make(), make()
    first.observe([segment(60)])
    first.update(0, 0.0)
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        algorithm.observe([segment(50, seed=1)])
        algorithm.update(1, 0.5)
    np.testing.assert_array_equal(first.policy.weights, second.policy.weights)


def test_importance_is_the_mean_absolute_td_error() -> None:
    algorithm = SAC(env_spec(), SACConfig(hidden_sizes=(8,)), 0, "cpu", False)
    steps = algorithm.steps_of(segment(20))
    assert algorithm.importance(segment(20)) == pytest.approx(algorithm.agent.td_error(steps).abs().mean().item())


@pytest.mark.parametrize("algo", ["sac", "mbpo"])
def test_a_buffer_that_cannot_hold_the_first_steps_is_refused(algo: str) -> None:
    settings = {"env": "Pendulum-v1", "algo": algo, "total_steps": 2000, "learning_starts": 1000}
    make_config({**settings, "buffer_size": 1000})
    with pytest.raises(UserError, match="--buffer-size 999 steps cannot hold the --learning-starts 1000"):
        make_config({**settings, "buffer_size": 999})


def test_actions_that_are_not_in_a_bounded_box_are_refused() -> None:
    for space in (spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (1,), np.float32)):
        with pytest.raises(UserError, match="choose --algo ppo"):
            SAC(EnvSpec(env_spec().observation_space, space), SACConfig(), 0, "cpu", False)


@NEEDS_GPU
def test_a_recorded_step_is_the_eager_step() -> None:
    weights: list[torch.Tensor] = []
    accelerations: tuple[Acceleration, ...] = ("none", "graph")
    for acceleration in accelerations:
        config = SACConfig(hidden_sizes=(32, 32), acceleration=acceleration)
        algorithm = SAC(env_spec(), config, 0, "cuda", False)
        algorithm.observe([segment(500)])
        algorithm.take_gradient_steps(100)
        weights.append(algorithm.agent.weights.detach().cpu())
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


def test_without_a_gpu_a_repeated_step_is_a_loop() -> None:
    calls: list[int] = []
    GraphedStep(lambda: calls.append(1), CPU, (), "graph")(7)
    assert len(calls) == 7
