"""Gradient steps as a CUDA graph takes them, beside those that are taken one by one.

On a CPU everything but the recording itself runs; with a GPU the same tests record too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from freerun.algorithms.ppo.minibatches import Minibatches
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, TensorSegment

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
ENV = EnvSpec(spaces.Box(-np.inf, np.inf, (5,), np.float32), spaces.Box(-1, 1, (3,), np.float32))
NUM_STEPS, NUM_ENVS = 16, 10
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stops": {"target_kl": 0.004},
    "stops-and-adapts": {"target_kl": 0.02, "desired_kl": 0.01},
    "adapts": {"desired_kl": 0.002},
    "as-rsl-rl": {"value_clip": 0.2, "advantage_rows": "update", "entropy_coef": 0.01, "activation": "elu"},
    "own-network": {"network": "toy_networks:layered"},
}


def segment(ppo: PPO, rng: np.random.Generator, version: int, device: str) -> TensorSegment:
    """Made-up steps with the policy's own actions."""
    obs = rng.standard_normal((NUM_STEPS, NUM_ENVS, 5), np.float32)
    flat = obs.reshape(-1, 5)
    decision = ppo.policy.act(flat, ppo.policy.draw(rng, len(flat)))
    log_prob = ppo.policy.log_prob(decision.head, decision.action).reshape(NUM_STEPS, NUM_ENVS)
    reward = rng.standard_normal((NUM_STEPS, NUM_ENVS), np.float32) + obs[:, :, 0]

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    flags = torch.zeros((2, NUM_STEPS, NUM_ENVS), dtype=torch.bool, device=device)
    action = decision.action.reshape(NUM_STEPS, NUM_ENVS, -1)
    next_obs = np.roll(obs, -1, axis=0)
    steps = tensor(obs), tensor(action), tensor(log_prob), tensor(reward), flags[0], flags[1], tensor(next_obs)
    numbers = torch.zeros((NUM_STEPS, NUM_ENVS), device=device)
    return TensorSegment(*steps, numbers, numbers.long(), version=version, seconds=0.1)


def train(device: str, **settings: Any) -> tuple[PPO, list[dict[str, float]]]:
    sizes: dict[str, Any] = {"steps_per_update": 160, "minibatch_size": 20, "num_epochs": 4, "learning_rate": 2e-3}
    config = PPOConfig(learner="torch", normalize_obs=False, normalize_reward=False, **sizes, **settings)
    ppo = PPO(ENV, config, 0, device, False)
    rng = np.random.default_rng(1)
    metrics = []
    for version in range(4):
        ppo.observe([segment(ppo, rng, version, device)])
        metrics.append(dict(ppo.update(version, 0.0)))
    return ppo, metrics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_graph_takes_the_steps_that_are_taken_one_by_one(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, wanted = train(device, acceleration="none", **SETTINGS[name])
    if device == "cpu":
        monkeypatch.setattr("freerun.algorithms.ppo.ppo.acceleration_of", lambda *_: "graph")
    graphed, found = train(device, acceleration="graph", **SETTINGS[name])
    for one, other in zip(found, wanted, strict=True):
        assert one["num_gradient_steps"] == other["num_gradient_steps"]
        # The last bit decides whether a ratio that lies on the clip range counts as clipped: a few rows may differ.
        assert one.pop("clip_fraction") == pytest.approx(other.pop("clip_fraction"), abs=5 / (4 * NUM_STEPS * NUM_ENVS))
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(graphed.policy.weights, plain.policy.weights, atol=1e-4)
    if "target_kl" in SETTINGS[name]:
        assert min(record["num_gradient_steps"] for record in found) < 32, "an update has stopped early"
    if "desired_kl" in SETTINGS[name]:
        assert len({record["learning_rate"] for record in found}) > 1


@pytest.mark.parametrize(
    ("num_rows", "captured", "sizes"),
    [
        (100, False, [50, 50]),
        (100, True, [50, 50]),  # too few to leave any out
        (101, True, [51, 50]),
        (520, False, [65] * 8),
        (520, True, [64] * 8),
        (575, True, [64] * 8),
        (576, True, [64] * 9),
    ],
)
def test_rows_are_dealt_into_minibatches(num_rows: int, captured: bool, sizes: list[int]) -> None:
    minibatches = Minibatches(num_rows, 64, captured)
    drawn = list(minibatches.draw(2, torch.Generator().manual_seed(0)))
    assert [len(rows) for rows in drawn] == 2 * sizes
    assert minibatches.are_even == (len(set(sizes)) == 1)
    first, second = (set(torch.cat(drawn[start : start + len(sizes)]).tolist()) for start in (0, len(sizes)))
    assert len(first) == len(second) == sum(sizes), "no row twice in an epoch"
    assert first <= set(range(num_rows))
    if sum(sizes) < num_rows:
        assert first != second, "other rows are left out of the next epoch"


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_serves_updates_of_any_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates shrink and grow; the same are taken with a new graph for each."""
    monkeypatch.setattr("freerun.algorithms.ppo.ppo.acceleration_of", lambda *_: "graph")
    weights = []
    for forgets in (False, True):
        ppo = PPO(ENV, PPOConfig(learner="torch", steps_per_update=160, minibatch_size=16), 0, device, False)
        rng = np.random.default_rng(1)
        for version, num_steps in enumerate((20, 17, 19, 25, 16)):
            steps = segment(ppo, rng, version, device)
            repeats = -(-num_steps // NUM_STEPS)
            longer: dict[str, Any] = {
                field.name: torch.cat([getattr(steps, field.name)] * repeats)[:num_steps]
                for field in dataclasses.fields(steps)
                if isinstance(getattr(steps, field.name), Tensor)
            }
            ppo.observe([dataclasses.replace(steps, **longer)])
            metrics = ppo.update(version, 0.0)
            assert metrics["num_gradient_steps"] == 10 * (num_steps * NUM_ENVS // 16)
            if forgets:
                ppo.load_state_dict(ppo.state_dict())  # captures again
        weights.append(ppo.policy.weights.copy())
    one_graph, new_graphs = weights
    np.testing.assert_allclose(one_graph, new_graphs, rtol=0.0, atol=0.0 if device == "cpu" else 1e-5)


class WaitingNetwork(nn.Module):
    """Looks at its input from Python, so the host must wait for the device."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.layer = nn.Linear(5, num_outputs)

    def forward(self, obs: Tensor) -> Tensor:
        output: Tensor = self.layer(obs) * (2.0 if obs.sum().item() > 0 else 1.0)
        return output


def waiting(space: spaces.Box, num_outputs: int) -> nn.Module:
    return WaitingNetwork(num_outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_that_waits_for_the_device_goes_without_a_graph(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, found = train(device, acceleration="auto", network=f"{__name__}:waiting")
    assert found[-1]["num_gradient_steps"] == 32
    assert ("makes the host wait for the GPU" in caplog.text) == (device == "cuda")
