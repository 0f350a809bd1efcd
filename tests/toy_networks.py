"""A user's own networks, good and bad."""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn


def cnn(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    channels, height, width = observation_space.shape
    return nn.Sequential(
        Scale(),
        nn.Conv2d(channels, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * (height - 2) * (width - 2), num_outputs),
    )


class Scale(nn.Module):
    def forward(self, picture: Tensor) -> Tensor:
        return picture / 255


def layered(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    """With numbers that are no parameters: statistics travel too, counters stay."""
    size = observation_space.shape[0]
    return nn.Sequential(nn.Linear(size, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, num_outputs))


def linear(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    return nn.Linear(observation_space.shape[0], num_outputs)


def no_module(observation_space: spaces.Box, num_outputs: int) -> int:
    return 3


def wrong_outputs(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(observation_space.shape).prod()), num_outputs + 1))


def wrong_inputs(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    return nn.Linear(3, num_outputs)


class Branching(nn.Module):
    """What it computes depends on the numbers that it sees, so nobody can write it down as a graph."""

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output if float(x.sum()) > 0.0 else -output


def branching(observation_space: spaces.Box, num_outputs: int) -> nn.Module:
    return Branching(observation_space.shape[0], num_outputs)
