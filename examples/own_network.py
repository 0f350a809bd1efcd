"""Your own network: a CNN that catches a falling ball, from pictures of 8 × 8.

python examples/own_network.py
PYTHONPATH=examples freerun train own_network:Catch --network own_network:cnn --envs-per-worker 8
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from torch import nn

import freerun

SIZE = 8
Picture = NDArray[np.uint8]


def cnn(observation_space: gym.spaces.Box, num_outputs: int) -> nn.Module:
    """Called once for the policy and once for the value function; it gets [N, 1, 8, 8] as float32."""
    channels, *_ = observation_space.shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(64),
        nn.ReLU(),
        nn.Linear(64, num_outputs),
    )


class Catch(gym.Env[Picture, np.int64]):
    """A ball falls; a paddle at the bottom moves left, stays or moves right. +1 for a catch, −1 for a miss."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Picture, Any]:
        super().reset(seed=seed)
        self._row, self._column = 0, int(self.np_random.integers(SIZE))
        self._paddle = SIZE // 2
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Picture, float, bool, bool, dict[str, Any]]:
        self._paddle = int(np.clip(self._paddle + int(action) - 1, 0, SIZE - 1))
        self._row += 1
        down = self._row == SIZE - 1
        reward = (1.0 if self._paddle == self._column else -1.0) if down else 0.0
        return self._look(), reward, down, False, {}

    def _look(self) -> Picture:
        picture = np.zeros((1, SIZE, SIZE), np.uint8)
        picture[0, self._row, self._column] = 1
        picture[0, SIZE - 1, self._paddle] = 1
        return picture


def main() -> None:
    result = freerun.train(
        Catch,
        network=cnn,
        total_steps=24_000,
        num_workers=2,
        envs_per_worker=8,  # one call of the network serves eight environments
        segment_steps=64,
        minibatch_size=256,
        num_epochs=4,
        learning_rate=1e-3,
    )
    print(f"mean return {result.summary['mean_return']:.2f}")


if __name__ == "__main__":  # workers import this file too
    main()
