"""Epsilon-greedy actions in numpy: the choice with the highest value, or now and then a random one."""

from __future__ import annotations

from typing import Any

import numpy as np

from freerun.algorithms.policies.action_heads import SingleAct, SingleForward
from freerun.core import Array, Decision, FloatArray


class EpsilonGreedy:
    """The outputs are the values of the choices. `epsilon` is the probability of a random choice."""

    prepare = None

    def __init__(self, num_choices: int):
        self.size = num_choices
        self.epsilon = 0.0

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        # u < epsilon decides whether to explore, and the second column is the random choice. Both are drawn at every
        # step, so that what an episode draws later does not depend on epsilon.
        noise = rng.random((num_steps, 2), np.float32)
        noise[:, 1] = np.floor(noise[:, 1] * self.size)
        return noise

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        best = output.argmax(axis=1)
        if noise is None:
            return Decision(best, output)
        return Decision(np.where(noise[:, 0] < self.epsilon, noise[:, 1].astype(np.int64), best), output)

    def single(self, forward: SingleForward) -> SingleAct:
        epsilon, integer = self.epsilon, np.int64

        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            explores, choice = noise.tolist()
            return integer(choice) if explores < epsilon else head.argmax()

        return act

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """0: nobody corrects for the probability of such actions."""
        return np.zeros(len(action), np.float32)
