"""An environment of your own: keep a room at 20 °C for a day, with as little heating as possible.

python examples/own_env.py                                    # train it from Python
PYTHONPATH=examples freerun train own_env:Room --watch        # or from the command line, as module:class
PYTHONPATH=examples freerun check-env own_env:Room            # is anything wrong with it?
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import freerun

QUARTERS_OF_A_DAY = 96
Observation = NDArray[np.float32]


class Room(gym.Env[Observation, np.int64]):
    """The heating of a room. Any class that is a `gymnasium.Env` will do; --env-args gives its arguments."""

    def __init__(self, target: float = 20.0):
        self.observation_space = gym.spaces.Box(-5.0, 5.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(3)  # off, half, full
        self._target = target

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        super().reset(seed=seed)  # all random numbers come from self.np_random, so the seed determines the episode
        self._inside = self._target + self.np_random.uniform(-5, 5)
        self._weather = self.np_random.uniform(-5, 15)
        self._quarter = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        # In a quarter of an hour 5 % of the difference to the outside is lost, and the heating adds up to 2.4 °C.
        self._inside += 0.05 * (self._outside - self._inside) + 1.2 * float(action)
        self._quarter += 1
        reward = -abs(self._inside - self._target) / 10 - 0.02 * float(action)
        # The day ends whatever the agent does, so the episode is truncated and not terminated.
        truncated = self._quarter == QUARTERS_OF_A_DAY
        return self._look(), reward, False, truncated, {}

    @property
    def _outside(self) -> float:
        # The coldest time is the beginning of the day, the warmest its middle.
        return self._weather - 5 * math.cos(2 * math.pi * self._quarter / QUARTERS_OF_A_DAY)

    def _look(self) -> Observation:
        off = (self._inside - self._target) / 5
        return np.array([off, self._outside / 10, self._quarter / QUARTERS_OF_A_DAY], np.float32).clip(-5, 5)


def main() -> None:
    result = freerun.train(
        Room,
        total_steps=24_000,
        num_workers=2,
        envs_per_worker=8,  # steps are quick, so each worker has several rooms
        segment_steps=QUARTERS_OF_A_DAY,
        learning_rate=1e-3,
    )
    print(f"mean return {result.summary['mean_return']:.1f}")


if __name__ == "__main__":  # workers import this file too
    main()
