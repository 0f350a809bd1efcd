"""FedProx's term in PPO's gradient."""

from __future__ import annotations

import torch
from torch import nn

from freerun.algorithms.ppo.gradient_steps import ProximalTerm


def test_the_gradient_is_the_distance_times_the_strength() -> None:
    weights = nn.Parameter(torch.tensor([1.0, -2.0]))
    term = ProximalTerm(weights)
    gradient = torch.tensor([10.0, -0.0])
    term.add_gradient(gradient)
    assert torch.signbit(gradient).tolist() == [False, True], "without a strength nothing is added, not even a zero"

    term.set(0.5)
    with torch.no_grad():
        weights.add_(torch.tensor([2.0, 4.0]))
    term.add_gradient(gradient)
    # 10 + 0.5 · 2 and 0 + 0.5 · 4
    assert gradient.tolist() == [11.0, 2.0]

    term.set(0.5)  # from now on near the weights of now
    term.add_gradient(gradient)
    assert gradient.tolist() == [11.0, 2.0]
