"""Epsilon-greedy actions in numpy: the choice with the highest value, or now and then a random one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.algorithms.policies.action_heads import MASKED_LOGIT, SingleAct, SingleForward
from freerun.core import Array, Decision, FloatArray


class EpsilonGreedy:
    """The outputs are the values of the choices. `epsilon` is the probability of a random choice.

    Where observations have masks, the values of forbidden choices are `MASKED_LOGIT`, below all others.
    """

    prepare = None

    def __init__(self, num_choices: int, has_mask: bool = False):
        self.size = num_choices
        self.epsilon = 0.0
        self._has_mask = has_mask

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        # u < epsilon decides whether to explore, and the second column is the random choice. Both are drawn at every
        # step, so that what an episode draws later does not depend on epsilon.
        noise = rng.random((num_steps, 2), np.float32)
        if not self._has_mask:  # otherwise the number of choices is not known yet
            noise[:, 1] = np.floor(noise[:, 1] * self.size)
        return noise

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        best = output.argmax(axis=1)
        if noise is None:
            return Decision(best, output)
        choice = self._allowed_choice(output, noise[:, 1]) if self._has_mask else noise[:, 1].astype(np.int64)
        return Decision(np.where(noise[:, 0] < self.epsilon, choice, best), output)

    def _allowed_choice(self, output: FloatArray, uniform: FloatArray) -> NDArray[np.int64]:
        """One of the n choices that are allowed: that with the number floor(u * n) among them."""
        num_so_far = np.cumsum(output != MASKED_LOGIT, axis=1)
        # In float32, as `single` computes it: float64 may lie on the other side of a whole number.
        number = np.floor(uniform * num_so_far[:, -1].astype(np.float32))
        choice: NDArray[np.int64] = (num_so_far <= number[:, None]).sum(axis=1)
        # Where nothing is allowed, no action follows, and any will do.
        return np.minimum(choice, self.size - 1)

    def single(self, forward: SingleForward) -> SingleAct:
        epsilon, integer = self.epsilon, np.int64

        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            explores, choice = noise.tolist()
            return integer(choice) if explores < epsilon else head.argmax()

        def act_masked(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            if noise[0] < epsilon:
                allowed = np.flatnonzero(head != MASKED_LOGIT)
                return allowed[int(noise[1] * np.float32(len(allowed)))]
            return head.argmax()

        return act_masked if self._has_mask else act

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """0: nobody corrects for the probability of such actions."""
        return np.zeros(len(action), np.float32)
