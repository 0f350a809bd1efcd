"""SAC's gradients written out, in numpy and for GPUs, beside autograd: the same weights after 100 gradient steps.

Two ways of rounding end at the same weights as long as no ReLU and no choice of the smaller critic tips over between
them. In networks of these sizes none does.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from freerun.algorithms.mbpo.mbpo import MBPO
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.sac.gpu_steps import GPUSoftSteps
from freerun.algorithms.sac.replay_buffer import ReplaySample, StepBatch
from freerun.algorithms.sac.sac import SAC
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_agent import SoftAgent
from freerun.algorithms.sac.soft_steps import AutogradSoftSteps
from freerun.core import EnvSpec, Segment, SingleLearner, UserError

Way = Literal["fast", "torch", "gpu"]
"""Who computes gradients; `gpu` is what a GPU has by default, here on a CPU."""
WAYS: tuple[Way, ...] = ("fast", "torch", "gpu")
OBS_SIZE, NUM_STEPS = 5, 200
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short-sighted": {"gamma": 0.5, "target_rate": 0.1},
    "prioritised": {"replay": "prioritised"},
    "recency": {"replay": "recency"},
    "tanh": {"activation": "tanh"},
    "elu": {"activation": "elu"},
    "one-hidden-layer": {"hidden_sizes": (17,)},
    "three-hidden-layers": {"hidden_sizes": (12, 9, 11)},
    "target-entropy": {"target_entropy": 2.0},
    "large-steps": {"learning_rate": 3e-3},
}


def env(num_actions: int) -> EnvSpec:
    return EnvSpec(spaces.Box(-np.inf, np.inf, (OBS_SIZE,), np.float32), spaces.Box(-2, 2, (num_actions,), np.float32))


def segment(num_actions: int) -> Segment:
    rng = np.random.default_rng(1)
    column = (NUM_STEPS, 1)
    obs = rng.standard_normal((*column, OBS_SIZE), np.float32)
    number = np.zeros(column, np.int64)
    return Segment(
        obs=obs,
        action=rng.uniform(-2, 2, (*column, num_actions)).astype(np.float32),
        log_prob=np.zeros(column, np.float32),
        reward=rng.standard_normal(column, np.float32) + obs[:, :, 0],
        terminated=rng.random(column) < 0.2,
        truncated=np.zeros(column, np.bool_),
        next_obs=np.roll(obs, -1, axis=0),
        version=number,
        episode=number,
        seconds=0.0,
    )


def with_gradients(agent: SoftAgent, way: Way) -> SoftAgent:
    if way == "gpu":
        assert isinstance(agent.soft_steps, AutogradSoftSteps)
        agent.soft_steps = GPUSoftSteps(agent.soft_steps.parts)
    return agent


def made(way: Way, num_actions: int = 1, policy_scale: float = 1.0, **settings: Any) -> SAC:
    """A learner with 200 steps in its buffer. `policy_scale` multiplies all weights of its untrained policy."""
    config = SACConfig(
        **{"hidden_sizes": (16, 16), "batch_size": 20, "buffer_size": 300, "learning_starts": 0, **settings},
        learner="fast" if way == "fast" else "torch",
    )
    sac = SAC(env(num_actions), config, 0, "cpu", False)
    with_gradients(sac.agent, way)
    with torch.no_grad():
        sac.agent.weights.mul_(policy_scale)
    sac.observe([segment(num_actions)])
    return sac


def learned(agent: SoftAgent) -> dict[str, Tensor]:
    """All that gradient steps change: weights (the temperature's first) and the moments of both optimisers."""
    state = agent.state_dict()
    found = {name: state[name].clone() for name in ("actor", "critics", "targets")}
    for name in ("actor_optimizer", "critic_optimizer"):
        found |= {f"{name}/{moment}": value.clone() for moment, value in state[name]["state"].get(0, {}).items()}
    return found


def assert_same(found: dict[str, Tensor], reference: dict[str, Tensor], atol: float = 2e-5) -> None:
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        if value.ndim == 0:
            assert found[name] == value, name  # the number of steps
            continue
        # Moments are as large as gradients or their squares, weights about 1.
        scale = value.abs().max().item() if "/" in name else 1.0
        difference = (found[name] - value).abs().max().item()
        assert difference <= atol * scale, f"{name}: {difference} of {scale}"


def assert_both_the_same(way: Way, num_actions: int, **settings: Any) -> None:
    fast, torch_one = (made(one, num_actions, **settings) for one in (way, WAYS[1]))
    before = learned(torch_one.agent)
    for sac in (fast, torch_one):
        sac.take_gradient_steps(100)
    reference = learned(torch_one.agent)
    for name, value in before.items():
        assert (reference[name] - value).abs().max() > 1e-3, name  # it has moved, and far more than the two differ
    assert abs(reference["actor"][0] - before["actor"][0]) > 1e-3  # the temperature too
    assert_same(learned(fast.agent), reference)
    assert fast.agent.metrics() == pytest.approx(torch_one.agent.metrics(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("num_actions", [1, 6])
@pytest.mark.parametrize("way", ["fast", "gpu"])
def test_they_end_at_the_same_weights_as_autograd(way: Way, num_actions: int, settings: dict[str, Any]) -> None:
    assert_both_the_same(way, num_actions, **settings)


@pytest.mark.parametrize("way", ["fast", "gpu"])
def test_they_agree_where_actions_are_at_their_limits_and_deviations_are_clamped(way: Way) -> None:
    sac = made("torch", 6, policy_scale=8.0)
    mean, log_std = sac.agent.networks.policy.net(sac.real_buffer.newest(NUM_STEPS).obs).chunk(2, dim=1)
    assert (mean.abs() > 10).any()
    assert (log_std > 2).any()
    assert (log_std < -10).any()
    assert_both_the_same(way, 6, policy_scale=8.0)


@pytest.mark.parametrize("way", ["fast", "gpu"])
def test_a_run_may_go_on_with_the_other_learner(way: Way) -> None:
    first = made(way)
    first.take_gradient_steps(50)
    state = first.state_dict()
    goes_on, changes = made(way), made("torch")
    for sac in (goes_on, changes):
        sac.take_gradient_steps(1)  # what it has learned by itself must not count any more
        sac.load_state_dict(state)
        sac.take_gradient_steps(50)
    found = learned(changes.agent)
    assert found["actor_optimizer/step"] == 100
    assert_same(learned(goes_on.agent), found)


@pytest.mark.parametrize("way", WAYS)
def test_each_learner_gives_the_same_bits_every_time(way: Way) -> None:
    one, other = made(way, replay="prioritised"), made(way, replay="prioritised")
    for sac in (one, other):
        sac.take_gradient_steps(10)
    for name, value in learned(one.agent).items():
        assert torch.equal(value, learned(other.agent)[name]), name


# ---------------------------------------------------------------------------------------------- one agent, one batch


def agent_of(way: Way, group: SingleLearner | None = None, **settings: Any) -> SoftAgent:
    config = SACConfig(hidden_sizes=(16, 16), learner="fast" if way == "fast" else "torch", **settings)
    return with_gradients(SoftAgent(ActorSpec.squashed(env(2), (16, 16), "relu"), config, 0, CPU, group), way)


def batch(num_rows: int = 21) -> ReplaySample:
    rng = torch.Generator().manual_seed(2)
    obs, next_obs = (torch.randn(num_rows, OBS_SIZE, generator=rng) for _ in range(2))
    action = torch.rand(num_rows, 2, generator=rng) * 2 - 1
    terminated = (torch.arange(num_rows) % 4 == 0).float()
    steps = StepBatch(obs, action, torch.randn(num_rows, generator=rng), next_obs, terminated)
    return ReplaySample(steps, torch.rand(num_rows, generator=rng) + 0.5, torch.arange(num_rows))


@pytest.mark.parametrize("way", ["fast", "gpu"])
def test_both_return_the_same_td_errors(way: Way) -> None:
    fast, reference = (agent_of(one).learn(batch()) for one in (way, WAYS[1]))
    assert reference.abs().max() > 0.1
    torch.testing.assert_close(fast, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("column", "num_bad"), [("reward", 1), ("action", 1), ("obs", 2)])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(way: Way, column: str, num_bad: int) -> None:
    """Rewards and stored actions stand in the critics' loss alone, observations in the policy's too."""
    agent = agent_of(way)
    agent.learn(batch())
    agent.metrics()
    before = learned(agent)
    bad = batch()
    getattr(bad.steps, column)[3] = torch.nan
    agent.learn(bad)
    assert agent.metrics()["bad_gradients"] == num_bad
    kept = ["critics", *(name for name in before if name.startswith("critic_optimizer"))]
    if num_bad == 2:
        kept += ["actor", *(name for name in before if name.startswith("actor_optimizer"))]
    for name in kept:
        assert torch.equal(learned(agent)[name], before[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_what_follows_a_terminated_step_does_not_count_even_if_it_is_not_finite(way: Way) -> None:
    one, other = agent_of(way), agent_of(way)
    one.learn(batch())
    unusual = batch()
    unusual.steps.next_obs[unusual.steps.terminated > 0] = torch.nan
    other.learn(unusual)
    assert other.metrics()["bad_gradients"] == 0
    assert_same(learned(other), learned(one), atol=0.0)


class Exchange:
    """Where two learners in two threads add up their tensors."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.parts: list[Tensor] = [torch.empty(0), torch.empty(0)]


class OneOfTwo(SingleLearner):
    count = 2

    def __init__(self, index: int, exchange: Exchange):
        self.index = index
        self._exchange = exchange

    def sum(self, tensor: Tensor) -> None:
        self._exchange.parts[self.index] = tensor.clone()
        self._exchange.barrier.wait()
        tensor.copy_(self._exchange.parts[0] + self._exchange.parts[1])
        self._exchange.barrier.wait()  # before the next sum takes the place of this one


@pytest.mark.parametrize("way", WAYS)
def test_two_learners_take_the_steps_of_one(way: Way) -> None:
    def learn(agent: SoftAgent) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        td_errors = [agent.learn(batch()) for _ in range(10)]  # 21 rows: one of two learners has a row more
        return td_errors[-1], learned(agent), dict(agent.metrics())

    td_error, reference, metrics = learn(agent_of("torch", replay="prioritised"))
    exchange = Exchange()
    agents = [agent_of(way, OneOfTwo(index, exchange), replay="prioritised") for index in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(learn, agents))
    for its_td_error, its_weights, its_metrics in found:
        assert_same(its_weights, reference)
        torch.testing.assert_close(its_td_error, td_error, atol=2e-5, rtol=0)
        assert its_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)


# ---------------------------------------------------------------------------------------------- who may choose what


def test_mbpo_has_the_same_two_learners() -> None:
    found = []
    for learner in ("fast", "torch"):
        sizes: dict[str, Any] = {"hidden_sizes": (16, 16), "model_hidden_sizes": (8,), "batch_size": 20}
        pace: dict[str, Any] = {"learning_starts": 0, "updates_per_step": 0.2, "model_updates_per_step": 0.1}
        config = MBPOConfig(**sizes, **pace, rollouts_per_step=5.0, real_share=0.5, learner=learner)
        mbpo = MBPO(env(2), config, 0, "cpu", True)
        mbpo.observe([segment(2)])
        assert mbpo.update(0, 0.0)["agent_updates"] == 10
        found.append(learned(mbpo.agent))
    assert not torch.equal(found[0]["actor"], found[1]["actor"])  # they are indeed two
    assert_same(found[0], found[1])


@pytest.mark.parametrize("kind", [SAC, MBPO])
def test_the_header_says_who_computes_how_many_gradients(kind: type[SAC] | type[MBPO]) -> None:
    note, make = kind.traits.learner_note, SACConfig if kind is SAC else MBPOConfig
    assert note is not None
    pace = "updates of 50 steps, 2 gradient steps per step on batches of 256"
    pace += ", and up to 10 of the model" if kind is MBPO else ""
    assert note(make(updates_per_step=2.0), "cpu") == f"{pace} · fast learner"
    assert note(make(updates_per_step=2.0), "cuda") == f"{pace} · fast learner"
    assert note(make(updates_per_step=2.0, learner="torch"), "cpu") == f"{pace} · torch learner"
    assert note(make(updates_per_step=2.0, learner="torch"), "cuda:0") == f"{pace} · torch learner"


def test_fast_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(UserError, match="--learner numpy computes on the CPU"):
        SAC(env(1), SACConfig(learner="numpy"), 0, "cuda", False)
