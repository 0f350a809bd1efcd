"""From a policy's output to an action and its log-probability, in numpy, for many environments at once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from freerun.core import Array, Decision, FloatArray

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_STD_LIMITS = (-10.0, 2.0)
"""Of a squashed Gaussian, whose deviation depends on the observation (Haarnoja et al. 2018)."""
SMALLEST_EXPONENTIAL = np.float32(1e-30)
SQUASHED_EDGE = np.float32(1e-6)


Forward = Callable[[Array, FloatArray], Any]
"""A policy's output for one observation, written where it is wanted; returned is what `Head.prepare` makes of it."""
Single = Callable[[Array, FloatArray, FloatArray], Any]
"""(observation, noise, head to fill) -> action."""


class Head(Protocol):
    size: int
    """Numbers that `log_prob` needs of each step."""

    @property
    def prepare(self) -> Callable[[FloatArray], Any] | None:
        """Makes of an output what choosing takes besides noise, if anything."""
        ...

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray: ...

    def choose(self, output: FloatArray, noise: FloatArray | None) -> Decision: ...

    def single(self, forward: Forward) -> Single:
        """The whole of a policy for one observation, given all of it but the choice."""
        ...

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray: ...


def prepared(forward: Forward, head: Head) -> Forward:
    """That returns what the head makes of its output."""
    if (prepare := head.prepare) is None:
        return forward

    def forward_and_prepare(obs: Array, output: FloatArray) -> Any:
        forward(obs, output)
        return prepare(output)

    return forward_and_prepare


class Categorical:
    """Independent categories, sampled by the Gumbel-max trick: one addition and one argmax, whatever the batch."""

    prepare: Callable[[FloatArray], Any] | None = None

    def __init__(self, sizes: tuple[int, ...], scalar_actions: bool):
        self.size = sum(sizes)
        self._scalar_actions = scalar_actions
        ends = np.cumsum(sizes).tolist()
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        """Gumbel noise: minus the logarithm of exponential noise."""
        noise = rng.standard_exponential((num_steps, self.size), np.float32)
        np.maximum(noise, SMALLEST_EXPONENTIAL, out=noise)
        np.log(noise, out=noise)
        return np.negative(noise, out=noise)

    def choose(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        perturbed = output if noise is None else output + noise
        if self._scalar_actions:
            return Decision(perturbed.argmax(axis=1), output)
        return Decision(np.stack([perturbed[:, part].argmax(axis=1) for part in self._parts], axis=1), output)

    def single(self, forward: Forward) -> Single:
        perturbed = np.zeros(self.size, np.float32)
        add, argmax = np.add, perturbed.argmax
        parts = [perturbed[part] for part in self._parts]

        def choose_scalar(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            add(head, noise, perturbed)
            return argmax()

        def choose_each(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            add(head, noise, perturbed)
            return np.array([part.argmax() for part in parts])

        return choose_scalar if self._scalar_actions else choose_each

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        action = action.reshape(len(action), -1)
        rows = np.arange(len(action))
        total = np.zeros(len(action), np.float32)
        for column, part in enumerate(self._parts):
            logits = head[:, part] - head[:, part].max(axis=1, keepdims=True)
            total += logits[rows, action[:, column]] - np.log(np.exp(logits).sum(axis=1))
        return total


class ManyChoices(Categorical):
    """Categories too many to draw noise for each: one uniform number finds its place among the cumulated
    probabilities."""

    def __init__(self, sizes: tuple[int, ...], scalar_actions: bool):
        super().__init__(sizes, scalar_actions)
        self.prepare = self._list_bounds

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        return rng.random((num_steps, len(self._parts)), np.float32)

    def choose(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        if noise is None:
            return super().choose(output, None)
        columns = [
            (_bounds(output[:, part]) <= noise[:, column, None]).sum(axis=1) for column, part in enumerate(self._parts)
        ]
        return Decision(columns[0] if self._scalar_actions else np.stack(columns, axis=1), output)

    def _list_bounds(self, output: FloatArray) -> list[list[float]]:
        return [_bounds(output[part]).tolist() for part in self._parts]

    def single(self, forward: Forward) -> Single:
        integer = np.int64

        def choose_scalar(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            return integer(bisect_right(forward(obs, head)[0], noise.item()))

        def choose_each(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            return np.array([bisect_right(*pair) for pair in zip(forward(obs, head), noise.tolist(), strict=True)])

        return choose_scalar if self._scalar_actions else choose_each


def _bounds(logits: FloatArray) -> FloatArray:
    """Where the probability of one choice ends and that of the next begins, [..., choices] -> [..., choices - 1]."""
    bounds: FloatArray = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    np.exp(bounds, out=bounds)
    np.add.accumulate(bounds, axis=-1, out=bounds)
    bounds /= bounds[..., -1:].copy()
    return bounds[..., :-1]


class Gaussian:
    """A diagonal Gaussian around the output, its deviation independent of the observation."""

    prepare = None

    def __init__(self, size: int):
        self.size = size
        self._std = np.ones(size, np.float32)
        self.load(np.zeros(size, np.float32))

    def load(self, log_std: FloatArray) -> None:
        np.exp(log_std, out=self._std)
        self._log_norm = log_std.sum() + np.float32(LOG_SQRT_2PI * self.size)

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        return rng.standard_normal((num_steps, self.size), np.float32)

    def choose(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        if noise is None:
            return Decision(output.copy(), np.zeros_like(output))
        return Decision(output + self._std * noise, noise)

    def single(self, forward: Forward) -> Single:
        mean, std = np.zeros(self.size, np.float32), self._std

        def choose(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, mean)
            head[...] = noise
            return mean + std * noise

        return choose

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """The noise says it all: the action lies that many deviations from the mean."""
        log_prob: FloatArray = -0.5 * (head * head).sum(axis=1) - self._log_norm
        return log_prob


class SquashedGaussian:
    """A Gaussian whose mean and deviation depend on the observation, squashed by tanh into the range of the actions.

    Before anything is learned the mean is 0 and the deviation 1: actions spread almost evenly over their range, so
    no first steps with random actions are needed.
    """

    prepare = None

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...]):
        self.size = 2 * len(low)
        self._low, self._high = np.array(low, np.float32), np.array(high, np.float32)
        self._centre, self._reach = (self._high + self._low) / 2, (self._high - self._low) / 2
        self._log_norm = np.float32(LOG_SQRT_2PI * len(low)) + np.log(self._reach).sum()

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        return rng.standard_normal((num_steps, len(self._low)), np.float32)

    def choose(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        """The head keeps the mean and the logarithm of the deviation, as the network gave them."""
        mean, log_std = np.split(output, 2, axis=1)
        chosen = mean if noise is None else mean + np.exp(np.clip(log_std, *LOG_STD_LIMITS)) * noise
        return Decision(self._centre + self._reach * np.tanh(chosen), output)

    def single(self, forward: Forward) -> Single:
        num_actions = len(self._low)
        lowest, highest = (np.float32(limit) for limit in LOG_STD_LIMITS)

        def choose(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            deviation = np.exp(np.minimum(np.maximum(head[num_actions:], lowest), highest))
            return self._centre + self._reach * np.tanh(head[:num_actions] + deviation * noise)

        return choose

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Back through tanh; an action at the very edge of the range is taken for one just inside."""
        mean, log_std = np.split(head, 2, axis=1)
        log_std = np.clip(log_std, *LOG_STD_LIMITS)
        squashed = np.clip((action - self._centre) / self._reach, -1 + SQUASHED_EDGE, 1 - SQUASHED_EDGE)
        deviations = (np.arctanh(squashed) - mean) * np.exp(-log_std)
        gaussian = -0.5 * (deviations * deviations).sum(axis=1) - log_std.sum(axis=1) - self._log_norm
        log_prob: FloatArray = gaussian - np.log1p(-squashed * squashed).sum(axis=1)
        return log_prob
