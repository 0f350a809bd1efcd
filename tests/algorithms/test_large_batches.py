"""Fast SAC: returns over several steps, distributions and targets worked out by hand, and what its settings refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import freerun
from freerun.algorithms.fastsac.critic_heads import DistributionHead, ScalarHead, of_both
from freerun.algorithms.fastsac.fastsac import FastSAC
from freerun.algorithms.fastsac.fastsac_config import FastSACConfig
from freerun.algorithms.fastsac.obs_normalizer import ObsNormalizer
from freerun.algorithms.policies.action_heads import NoisyTanh
from freerun.algorithms.policies.networks import NormalizedReLU
from freerun.algorithms.sac.n_step_returns import n_step_returns
from freerun.core import EnvSpec, TensorSegment, UserError
from freerun.settings.defaults import complete
from freerun.settings.registry import make_config

CPU = torch.device("cpu")
ENV = EnvSpec(spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(-2.0, 2.0, (1,), np.float32))
DRONES: dict[str, Any] = {"env": "freerun/RoughDrone-v0", "algo": "fastsac"}


def columns(*rows: list[float]) -> torch.Tensor:
    """Rows of one environment each, as a segment [T, B]."""
    return torch.tensor(rows).T


def segment(reward: torch.Tensor, terminated: torch.Tensor, truncated: torch.Tensor) -> TensorSegment:
    """Step t of environment b leads from observation (t, b) to (t + 1, b)."""
    num_steps, num_envs = reward.shape
    steps, envs = torch.meshgrid(torch.arange(num_steps + 1.0), torch.arange(float(num_envs)), indexing="ij")
    obs = torch.stack([steps, envs], dim=2)
    action, nothing = torch.ones(num_steps, num_envs, 1), torch.zeros(num_steps, num_envs)
    return TensorSegment(
        obs[:-1], action, nothing, reward, terminated.bool(), truncated.bool(), obs[1:], nothing, nothing, 3, 0.0
    )


# ---------------------------------------------------------------------------------------------- n-step returns


def test_rewards_are_summed_up_to_the_end_of_an_episode_and_of_the_segment() -> None:
    """Three steps, gamma 0.5: r_t + r_{t+1} / 2 + r_{t+2} / 4, in an episode that goes on, one that terminates after
    its second step, and one that is truncated there."""
    reward = columns([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8])
    terminated, truncated = columns([0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]), columns([0] * 4, [0] * 4, [0, 1, 0, 0])
    total, last, lost = n_step_returns(reward.float(), terminated, truncated, 3, 0.5)
    assert total.T.tolist() == [[3.0, 6.0, 8.0, 8.0], [2.0, 2.0, 8.0, 8.0], [2.0, 2.0, 8.0, 8.0]]
    assert last.T.tolist() == [[2, 3, 3, 3], [1, 1, 3, 3], [1, 1, 3, 3]]
    # After k steps the value counts gamma^k = 0.5 * (1 - lost); after a termination nothing does.
    assert lost.T.tolist() == [[0.75, 0.75, 0.5, 0.0], [1.0, 1.0, 0.5, 0.0], [0.5, 0.0, 0.5, 0.0]]


def test_a_reward_of_the_next_episode_that_is_not_finite_does_not_count() -> None:
    reward, ended = columns([1.0, torch.nan]), columns([1, 0])
    assert n_step_returns(reward, ended, torch.zeros_like(ended), 2, 0.5).reward[0, 0] == 1.0


def test_the_value_is_taken_at_the_observation_after_the_last_reward() -> None:
    algorithm = FastSAC(ENV, FastSACConfig(hidden_sizes=(8,), gamma=0.5, num_return_steps=2), 0, "cpu", False)
    ended = columns([0, 1, 0], [0, 0, 0])
    steps = algorithm.steps_of(segment(columns([1.0, 1, 1], [2.0, 2, 2]), torch.zeros(3, 2), ended))
    # Rows are (step 0 of both environments), (step 1 of both), (step 2 of both).
    assert steps.obs.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert steps.next_obs.tolist() == [[2, 0], [2, 1], [2, 0], [3, 1], [3, 0], [3, 1]]
    assert steps.reward.tolist() == [1.5, 3.0, 1.0, 3.0, 1.0, 2.0]
    assert steps.terminated.tolist() == [0.5, 0.5, 0.0, 0.5, 0.0, 0.0]
    assert steps.action[:, 0].tolist() == [0.5] * 6  # scaled to [-1, 1]


# ---------------------------------------------------------------------------------------------- critics


def test_what_counts_of_two_critics() -> None:
    values = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
    assert of_both(values, "mean").tolist() == [2.0, 3.0]
    assert of_both(values, "min").tolist() == [1.0, 1.0]


def test_a_scalar_target() -> None:
    output = torch.tensor([[[1.0]], [[3.0]]])  # of two critics, for one row
    reward, discount, bonus = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.2])
    assert ScalarHead("mean").target(output, reward, discount, bonus).item() == pytest.approx(1 + 0.5 * (2 + 0.2))
    assert ScalarHead("min").target(output, reward, discount, bonus).item() == pytest.approx(1 + 0.5 * (1 + 0.2))
    assert ScalarHead("min").loss(output, torch.tensor([2.0])).tolist() == [[0.5], [0.5]]


def test_a_distribution_is_moved_and_shared_among_the_atoms_next_to_it() -> None:
    """Atoms 0, 1, 2, 3. A return of 1.25 is 3/4 of atom 1 and 1/4 of atom 2; what lies outside goes to the ends."""
    head = DistributionHead("mean", 0.0, 3.0, 4, CPU)
    probability = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]])
    returns = torch.tensor([[9.0, 1.25, 9.0, 9.0], [-4.0, 9.0, 9.0, 7.0], [9.0, 9.0, 2.0, 9.0]])
    projected = head.project(probability, returns)
    assert projected.tolist() == [[0.0, 0.75, 0.25, 0.0], [0.5, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]]
    assert head.target_value(projected).tolist() == [1.25, 1.5, 2.0]


def test_the_target_of_a_distribution_is_that_of_both_critics_or_of_the_lower_one() -> None:
    """One critic is sure of atom 1, the other of atom 2; r = 0.5, discount 0.5, bonus 0: they move to 1 and 1.5."""
    sure = torch.tensor([[[-99.0, 0.0, -99.0]], [[-99.0, -99.0, 0.0]]])
    reward, discount, bonus = torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([0.0])
    mean, low = (DistributionHead(twins, 0.0, 2.0, 3, CPU) for twins in ("mean", "min"))
    assert mean.values(sure).tolist() == [[1.0], [2.0]]
    assert mean.target(sure, reward, discount, bonus)[0].tolist() == pytest.approx([0.0, 0.75, 0.25])
    assert low.target(sure, reward, discount, bonus)[0].tolist() == pytest.approx([0.0, 1.0, 0.0])
    even = torch.zeros(2, 1, 3)
    loss = mean.loss(even, torch.tensor([[0.0, 1.0, 0.0]]))  # -log(1/3)
    assert loss.flatten().tolist() == pytest.approx([math.log(3)] * 2)


def test_a_normalised_layer() -> None:
    """Mean 2 and deviation 1: (1, 3) becomes (-1, 1), of which a ReLU leaves (0, 1)."""
    assert NormalizedReLU()(torch.tensor([[1.0, 3.0]]))[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-4)


def target_of(algorithm: FastSAC, lost: float) -> float:
    """The TD error at critics that say 0 is minus the target; the target critics say 4."""
    networks = algorithm.agent.networks
    for critics, value in ((networks.critics, 0.0), (networks.target_critics, 4.0)):
        for weight in critics.parameters():
            weight.data.zero_()
        critics.biases[-1].data.fill_(value)
    for weight in networks.policy.net.parameters():
        weight.data.zero_()
    steps = algorithm.steps_of(segment(columns([1.0]), torch.zeros(1, 1), torch.zeros(1, 1)))
    steps = steps._replace(terminated=torch.tensor([lost]))
    return -float(algorithm.agent.soft_steps.td_error(steps))  # type: ignore[attr-defined]


def test_what_the_critics_should_learn() -> None:
    """y = 1 + gamma * (1 - lost) * (4 + alpha * log sqrt(2 pi)), for a policy with mean 0 and deviation 1, at 0."""
    settings: dict[str, Any] = {"hidden_sizes": (8,), "gamma": 0.9, "initial_temperature": 0.5}
    algorithm = FastSAC(ENV, FastSACConfig(**settings), 0, "cpu", False)
    value = 4 + 0.5 * 0.5 * math.log(2 * math.pi)
    assert target_of(algorithm, 0.0) == pytest.approx(1 + 0.9 * value, abs=1e-5)
    assert target_of(algorithm, 0.1) == pytest.approx(1 + 0.81 * value, abs=1e-5)
    assert target_of(algorithm, 1.0) == pytest.approx(1.0)
    plain = FastSAC(ENV, FastSACConfig(**settings, policy="deterministic"), 0, "cpu", False)
    assert target_of(plain, 0.0) == pytest.approx(1 + 0.9 * 4)  # it has no entropy


# ---------------------------------------------------------------------------------------------- what workers get


def test_observations_are_scaled_by_the_moments_of_all_so_far() -> None:
    """Column 0 holds 1 and 3, then 5 and 7: mean 4, variance 5. Column 1 lies within -1 and 1 and is left alone."""
    space = spaces.Box(np.array([-9, -1], np.float32), np.array([9, 1], np.float32))
    normalize = ObsNormalizer(space, CPU, enabled=True)
    assert normalize(torch.tensor([[2.0, 0.5]])).tolist() == [[2.0, 0.5]]
    normalize.update(torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
    normalize.update(torch.tensor([[5.0, 0.0], [7.0, 1.0]]))
    expected = [(6 - 4) / math.sqrt(5), 0.5]
    assert normalize(torch.tensor([[6.0, 0.5]]))[0].tolist() == pytest.approx(expected)
    again = ObsNormalizer(space, CPU, enabled=True)
    again.load_state_dict(normalize.state_dict())
    assert torch.equal(again.mean, normalize.mean)
    assert ObsNormalizer(space, CPU, enabled=False).statistics() == {}


def test_the_policy_of_workers_has_the_same_moments() -> None:
    algorithm = FastSAC(ENV, FastSACConfig(hidden_sizes=(8,), learning_starts=0, batch_size=4), 0, "cpu", False)
    zeros = torch.zeros(4, 3)
    algorithm.observe([segment(zeros, zeros, zeros)])
    algorithm.update(0, 0.0)
    # Steps 0 to 3 of environments 0 to 2.
    assert algorithm.policy.arrays["obs_mean"].tolist() == [1.5, 1.0]
    assert algorithm.policy.arrays["obs_scale"].tolist() == pytest.approx([1 / math.sqrt(1.25), 1 / math.sqrt(2 / 3)])
    obs = torch.tensor([[2.0, 0.5]])
    action = algorithm.policy.act(obs.numpy(), None).action
    normalized = (obs - torch.tensor([1.5, 1.0])) / torch.tensor([1.25, 2 / 3]).sqrt()
    mean = algorithm.agent.networks.policy.net(normalized)[0, 0].tanh()
    assert action[0, 0] == pytest.approx(2 * mean.item(), abs=1e-5)  # actions go from -2 to 2


def test_noise_of_a_deterministic_policy_has_deviations_of_the_whole_range() -> None:
    head = NoisyTanh((-2.0,), (4.0,), (0.1, 0.5))
    output = np.array([[math.atanh(0.5)], [math.atanh(0.5)]], np.float32)
    assert head.decide(output, None).action[:, 0].tolist() == pytest.approx([2.5, 2.5])  # 1 + 3 * 0.5
    noise = np.array([[0.2], [0.9]], np.float32)
    assert head.decide(output, noise).action[:, 0].tolist() == pytest.approx([3.1, 4.0])  # the second is cut off
    rng = np.random.default_rng(0)
    drawn = head.draw(rng, 50_000)
    # The variance of a deviation that is uniform in [a, b] times normal noise: (a^2 + a b + b^2) / 3
    assert float(drawn.var()) == pytest.approx((0.01 + 0.05 + 0.25) / 3, rel=0.05)
    one, two = np.random.default_rng(1), np.random.default_rng(1)
    np.testing.assert_array_equal(head.draw(one, 5), np.concatenate([head.draw(two, 2), head.draw(two, 3)]))


# ---------------------------------------------------------------------------------------------- the pace


def test_gradient_steps_are_counted_per_step_of_all_environments() -> None:
    many = complete(make_config({**DRONES, "num_envs": 4096, "updates_per_vector_step": 4.0})).algorithm
    assert (many.updates_per_step, many.batch_size, many.normalize_obs) == (4 / 4096, 8192, True)
    few = complete(make_config({**DRONES, "num_envs": 2})).algorithm
    assert (few.updates_per_step, few.batch_size) == (1.0, 256)
    assert complete(make_config({**DRONES, "num_envs": 4096})).algorithm.updates_per_step == 16 / 4096


@pytest.mark.parametrize(
    "settings",
    [
        {"critic": "distribution", "replay": "prioritised", "twins": "min"},
        {"policy": "deterministic", "precision": "bf16"},
        {"num_return_steps": 1, "layer_norm": False, "normalize_obs": False, "policy_delay": 3},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_every_way_of_learning_runs_and_goes_on(settings: dict[str, Any], run_dir: Any) -> None:
    common = {**DRONES, "num_envs": 4, "num_steps_per_env": 6, "hidden_sizes": (8,), "batch_size": 16, "quiet": True}
    common |= {"env_args": {"task": "hover"}, "learning_starts": 20, "updates_per_vector_step": 1.0}
    freerun.train(**common, **settings, mode="sync", total_steps=120, run_dir=run_dir)
    result = freerun.resume(run_dir, total_steps=240)
    assert result.summary["env_steps"] == 240
    assert np.isfinite(result.policy.weights).all()
    assert np.isfinite(freerun.evaluate(result.policy, episodes=1).returns).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"learner": "fast"}, "--learner fast has no gradients of fast SAC"),
        ({"learner": "numpy"}, "--learner numpy has no gradients of fast SAC"),
        ({"updates_per_vector_step": 4.0, "updates_per_step": 1.0}, "give one of them"),
        ({"v_min": 3.0, "v_max": 1.0}, "--v-max must be above --v-min"),
        ({"noise_range": (0.4, 0.1)}, "--noise-range must be two numbers"),
        ({"policy_delay": 0}, "--policy-delay"),
        ({"initial_temperature": 0.0}, "--initial-temperature must be above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        FastSACConfig(**settings)
