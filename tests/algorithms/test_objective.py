"""Parts of PPO's objective on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from freerun.algorithms.policies.mlp_actor import ActorSpec, elu
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.objective import clipped_value_error, normalized_advantage, ppo_losses
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import EnvSpec


def batch(num_rows: int, **columns: torch.Tensor) -> TrainingBatch:
    zero = torch.zeros(num_rows)
    obs, action = torch.ones(num_rows, 1), torch.zeros(num_rows, dtype=torch.int64)
    return TrainingBatch(obs, action, zero, zero + 1, zero, zero, zero)._replace(**columns)


def test_a_value_beyond_its_limit_costs_as_much_as_at_the_limit() -> None:
    """Old values 0, targets 1, limit 0.2: a value of 0.5 counts as 0.2, one of 0.1 and one of -0.5 as they are."""
    value = torch.tensor([0.5, 0.1, -0.5])
    rows = batch(3, value_target=torch.ones(3))
    clipped = clipped_value_error(value, rows, 0.2)
    assert clipped.tolist() == pytest.approx([0.64, 0.81, 1.44])
    assert torch.maximum((value - 1).square(), clipped).tolist() == pytest.approx([0.64, 0.81, 2.25])


def test_a_value_beyond_its_limit_gets_no_gradient() -> None:
    """V = w * 1 with w = 0.5: towards the target 1 it has moved too far already; a target of -1 pulls it back."""
    env = EnvSpec(spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2))
    net = ActorCritic(ActorSpec.of(env, (), "tanh"))
    (critic,) = (layer for layer in net.critic.children() if isinstance(layer, nn.Linear))
    nn.init.constant_(critic.weight, 0.5)
    config = PPOConfig(value_clip=0.2, value_coef=1.0, normalize_advantage=False)
    # d/dw (w + 1)^2 = 2 * 1.5 = 3
    for target, loss, slope in ((1.0, 0.64, 0.0), (-1.0, 2.25, 3.0)):
        critic.weight.grad = None
        losses = ppo_losses(net, config, batch(1, value_target=torch.tensor([target])))
        losses.total.backward()  # type: ignore[no-untyped-call]
        assert losses.value_loss.item() == pytest.approx(loss)
        assert critic.weight.grad is not None
        assert critic.weight.grad.item() == pytest.approx(slope)


def test_advantages_are_scaled_by_all_rows() -> None:
    """Rows 1, 2 and 3 have mean 2 and deviation 1."""
    assert normalized_advantage(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])).tolist() == [-1.0, 1.0]
    assert normalized_advantage(torch.tensor([5.0]), torch.tensor([5.0])).tolist() == [5.0]  # no deviation of one row


def test_elu_in_place() -> None:
    x = np.array([2.0, 0.0, -1.0], np.float32)
    elu(x, out=x)
    assert x.tolist() == pytest.approx([2.0, 0.0, 1 / np.e - 1])
