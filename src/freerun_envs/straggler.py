"""`freerun/Straggler-v0`: an environment as slow and uneven as a cyber-defence simulator that simulates nothing.

It has the spaces of CAGE challenge 2, so that policies and data have the same size.
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import FloatArray, UserError

NUM_BITS = 52
NUM_ACTIONS = 145
EPISODE_STEPS = (95, 103)
"""The shortest and the longest episode."""
TAIL_QUANTILE_SIGMAS = 3.09
"""`tail_seconds` is the 99.9th percentile of the step times: 3.09 sigmas above the mean of their logarithm."""


class Straggler(gymnasium.Env[FloatArray, np.int64]):
    """In each observation one bit is set, and the action with the number of that bit earns a reward of 1.

    Step times are log-normal, never above `tail_seconds`, and drawn from the episode's seed: the same episode takes the
    same time everywhere. A step sleeps that long, or keeps a core busy.
    """

    def __init__(
        self, mean_seconds: float = 0.010, tail_seconds: float = 0.050, kind: Literal["sleep", "busy"] = "sleep"
    ):
        if not 0 < mean_seconds <= tail_seconds:
            raise UserError(f"Straggler needs 0 < mean_seconds <= tail_seconds, not {mean_seconds} and {tail_seconds}")
        if kind not in ("sleep", "busy"):
            raise UserError(f"Straggler's kind is 'sleep' or 'busy', not {kind!r}")
        self.observation_space = spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._tail_seconds = tail_seconds
        self._location, self._sigma = _log_normal(mean_seconds, tail_seconds)
        self._pause = time.sleep if kind == "sleep" else _work

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps_left = int(self.np_random.integers(EPISODE_STEPS[0], EPISODE_STEPS[1] + 1))
        seconds = self.np_random.lognormal(self._location, self._sigma, self._steps_left)
        # Indexed by the steps that are left, so both lists are read from their end.
        self._seconds = np.minimum(seconds, self._tail_seconds).tolist()
        # One bit more than there are steps: the observation after the last step shows one too.
        self._set_bits = self.np_random.integers(NUM_BITS, size=self._steps_left + 1).tolist()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self._pause(self._seconds[self._steps_left - 1])
        reward = float(action == self._set_bits[self._steps_left])
        self._steps_left -= 1
        return self._observe(), reward, False, self._steps_left == 0, {}

    def _observe(self) -> FloatArray:
        obs = np.zeros(NUM_BITS, np.float32)
        obs[self._set_bits[self._steps_left]] = 1.0
        return obs


def _log_normal(mean: float, tail: float) -> tuple[float, float]:
    """The location m and the sigma s of the log-normal distribution with this mean and this tail."""
    # mean = exp(m + s^2 / 2) and tail = exp(m + z * s), so s^2 / 2 - z * s + log(tail / mean) = 0.
    # If the tail is too heavy for a log-normal distribution, the heaviest possible one is taken (s = z).
    z = TAIL_QUANTILE_SIGMAS
    sigma = z - math.sqrt(max(0.0, z**2 - 2 * math.log(tail / mean)))
    return math.log(mean) - sigma**2 / 2, sigma


def _work(seconds: float) -> None:
    """Use a core for that much CPU time of this thread, as a simulator would."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
