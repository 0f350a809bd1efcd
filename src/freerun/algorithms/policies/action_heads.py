"""Action distributions in numpy: from a policy's output to actions and their log-probabilities.

Workers use these without torch. `networks.py` has the same log-probabilities in torch, and a test compares the two.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from freerun.core import Array, Decision, FloatArray

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_STD_LIMITS = (-10.0, 2.0)
"""Limits of log(std) where the deviation depends on the observation, as in Haarnoja et al. 2018: no deviation
vanishes or explodes."""
SMALLEST_EXPONENTIAL = np.float32(1e-30)
"""Exponential noise is raised to this, because the logarithm of 0 is not finite."""
TANH_MARGIN = np.float32(1e-6)
"""Squashed actions are kept this far from -1 and 1, because atanh is infinite there."""
MASKED_LOGIT = -1e8
"""The logit of a choice that is not allowed. Its probability is then exactly 0 in float32, while p * log p is finite,
which it would not be with -inf."""

SingleForward = Callable[[Array, FloatArray], Any]
"""(observation, output to fill) -> what `ActionHead.prepare` makes of it: a forward pass for one observation."""
SingleAct = Callable[[Array, FloatArray, FloatArray], Any]
"""(observation, noise, head to fill) -> action: the whole policy for one observation."""


class ActionHead(Protocol):
    """A distribution over actions whose parameters are the output of a network."""

    size: int
    """How many numbers of each step `log_prob` needs."""

    @property
    def prepare(self) -> Callable[[FloatArray], Any] | None:
        """Computes from an output what sampling needs besides noise. None where it needs nothing else."""
        ...

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        """The noise for `num_steps` actions. `rng` is the episode's own, so that any worker would draw the same."""
        ...

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        """Actions for a batch of outputs; without noise the most likely ones."""
        ...

    def single(self, forward: SingleForward) -> SingleAct:
        """The policy for one observation, built from its forward pass."""
        ...

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Log-probabilities [N] of actions, given the heads that `decide` or `single` has returned with them."""
        ...


def with_preparation(forward: SingleForward, head: ActionHead) -> SingleForward:
    """A forward pass that also returns what `head.prepare` makes of its output."""
    if (prepare := head.prepare) is None:
        return forward

    def forward_and_prepare(obs: Array, output: FloatArray) -> Any:
        forward(obs, output)
        return prepare(output)

    return forward_and_prepare


def mask_logits(logits: FloatArray, rows: Array) -> None:
    """Rule out the choices that the masks at the end of these observations do not allow, in place."""
    logits[rows[..., -logits.shape[-1] :] == 0] = MASKED_LOGIT


class Categorical:
    """Independent categorical distributions, sampled by the Gumbel-max trick.

    Gumbel-max: argmax_i (logit_i + g_i) with g_i ~ Gumbel(0, 1) is a sample of softmax(logits). It takes one addition
    and one argmax for any batch, and no exponential of the logits.
    """

    prepare: Callable[[FloatArray], Any] | None = None

    def __init__(self, sizes: tuple[int, ...], scalar_actions: bool):
        self.size = sum(sizes)
        self._scalar_actions = scalar_actions
        ends = np.cumsum(sizes).tolist()
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        # Gumbel noise: g = -log(e) with e ~ Exp(1)
        noise = rng.standard_exponential((num_steps, self.size), np.float32)
        np.maximum(noise, SMALLEST_EXPONENTIAL, out=noise)
        np.log(noise, out=noise)
        return np.negative(noise, out=noise)

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        perturbed = output if noise is None else output + noise
        if self._scalar_actions:
            return Decision(perturbed.argmax(axis=1), output)
        return Decision(np.stack([perturbed[:, part].argmax(axis=1) for part in self._parts], axis=1), output)

    def single(self, forward: SingleForward) -> SingleAct:
        # Everything is bound to local names: with cold caches each attribute lookup costs a part of a microsecond.
        perturbed = np.zeros(self.size, np.float32)
        add, argmax = np.add, perturbed.argmax
        parts = [perturbed[part] for part in self._parts]

        def act_scalar(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            add(head, noise, perturbed)
            return argmax()

        def act_vector(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            add(head, noise, perturbed)
            return np.array([part.argmax() for part in parts])

        return act_scalar if self._scalar_actions else act_vector

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        action = action.reshape(len(action), -1)
        rows = np.arange(len(action))
        total = np.zeros(len(action), np.float32)
        for column, part in enumerate(self._parts):
            # log softmax: x_a - log(sum_i exp(x_i)); the maximum is subtracted first, so that exp cannot overflow
            logits = head[:, part] - head[:, part].max(axis=1, keepdims=True)
            total += logits[rows, action[:, column]] - np.log(np.exp(logits).sum(axis=1))
        return total


class InverseCDFCategorical(Categorical):
    """Categorical distributions with many choices, sampled by inverting the cumulative distribution.

    One uniform number per action replaces one Gumbel number per choice.
    """

    def __init__(self, sizes: tuple[int, ...], scalar_actions: bool):
        super().__init__(sizes, scalar_actions)
        self.prepare = self._cdf_arrays

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        # u has 24 random bits: choices with a probability far below 2^-24 may never be drawn.
        return rng.random((num_steps, len(self._parts)), np.float32)

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        if noise is None:
            return super().decide(output, None)
        # The sampled choice is the number of CDF values that are not above the uniform number.
        columns = [
            (_cdf(output[:, part]) <= noise[:, column, None]).sum(axis=1) for column, part in enumerate(self._parts)
        ]
        return Decision(columns[0] if self._scalar_actions else np.stack(columns, axis=1), output)

    def _cdf_arrays(self, output: FloatArray) -> list[array[float]]:
        """The CDF of each action as an `array.array`.

        `bisect` reads these nearly as fast as lists, and a number takes 4 bytes where a list needs 32: `OutputCache`
        stores many of them.
        """
        return [array("f", _cdf(output[part]).tobytes()) for part in self._parts]

    def single(self, forward: SingleForward) -> SingleAct:
        integer = np.int64

        def act_scalar(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            # bisect_right counts the CDF values <= u, as `decide` does. The type is that of numpy's argmax.
            return integer(bisect_right(forward(obs, head)[0], noise.item()))

        def act_vector(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            return np.array([bisect_right(*pair) for pair in zip(forward(obs, head), noise.tolist(), strict=True)])

        return act_scalar if self._scalar_actions else act_vector


def _cdf(logits: FloatArray) -> FloatArray:
    """The cumulative probabilities without the last one, which is 1: [..., choices] -> [..., choices - 1]."""
    cdf: FloatArray = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    # p_i = exp(x_i - max) / sum_k exp(x_k - max): the division comes after the sums, once for all.
    np.exp(cdf, out=cdf)
    np.add.accumulate(cdf, axis=-1, out=cdf)
    # A copy, because the division in place also divides its own divisor.
    cdf /= cdf[..., -1:].copy()
    return cdf[..., :-1]


class Gaussian:
    """A diagonal Gaussian whose mean is the output; its deviation does not depend on the observation."""

    prepare = None

    def __init__(self, size: int):
        self.size = size
        self._std = np.ones(size, np.float32)
        self.load(np.zeros(size, np.float32))

    def load(self, log_std: FloatArray) -> None:
        np.exp(log_std, out=self._std)
        # log of the normaliser: sum_i (log std_i + log sqrt(2 pi))
        self._log_normalizer = log_std.sum() + np.float32(LOG_SQRT_2PI * self.size)

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        return rng.standard_normal((num_steps, self.size), np.float32)

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        if noise is None:
            return Decision(output.copy(), np.zeros_like(output))
        # Reparameterisation: a = mean + std * noise
        return Decision(output + self._std * noise, noise)

    def single(self, forward: SingleForward) -> SingleAct:
        mean, std = np.zeros(self.size, np.float32), self._std

        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, mean)
            head[...] = noise
            return mean + std * noise

        return act

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """The head is the noise, which is (a - mean) / std: neither the mean nor the action is needed."""
        # log N(a; mean, std) = -0.5 * sum(noise^2) - sum(log std + log sqrt(2 pi))
        log_prob: FloatArray = -0.5 * (head * head).sum(axis=1) - self._log_normalizer
        return log_prob


class SquashedGaussian:
    """A Gaussian whose mean and deviation depend on the observation, squashed by tanh into the action range.

    An untrained policy has mean 0 and deviation 1, so its actions spread almost evenly over the range, and SAC needs no
    first phase of random actions.
    """

    prepare = None

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...]):
        self.size = 2 * len(low)
        self._low, self._high = np.array(low, np.float32), np.array(high, np.float32)
        self._centre, self._half_range = (self._high + self._low) / 2, (self._high - self._low) / 2
        self._log_normalizer = np.float32(LOG_SQRT_2PI * len(low)) + np.log(self._half_range).sum()

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        return rng.standard_normal((num_steps, len(self._low)), np.float32)

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        """The head is the network's output: the mean and log(std)."""
        mean, log_std = np.split(output, 2, axis=1)
        unsquashed = mean if noise is None else mean + np.exp(np.clip(log_std, *LOG_STD_LIMITS)) * noise
        return Decision(self._centre + self._half_range * np.tanh(unsquashed), output)

    def single(self, forward: SingleForward) -> SingleAct:
        num_actions = len(self._low)
        lowest, highest = (np.float32(limit) for limit in LOG_STD_LIMITS)

        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            # Two ufuncs are faster than `np.clip` on small arrays.
            std = np.exp(np.minimum(np.maximum(head[num_actions:], lowest), highest))
            return self._centre + self._half_range * np.tanh(head[:num_actions] + std * noise)

        return act

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """Invert the squashing; an action at the edge of the range counts as one just inside it."""
        mean, log_std = np.split(head, 2, axis=1)
        log_std = np.clip(log_std, *LOG_STD_LIMITS)
        # y = (a - centre) / half_range, u = atanh(y), noise = (u - mean) / std
        squashed = np.clip((action - self._centre) / self._half_range, -1 + TANH_MARGIN, 1 - TANH_MARGIN)
        noise = (np.arctanh(squashed) - mean) * np.exp(-log_std)
        gaussian = -0.5 * (noise * noise).sum(axis=1) - log_std.sum(axis=1) - self._log_normalizer
        # Change of variables (Haarnoja et al. 2018, appendix C): log p(a) = log N(u) - sum log(half_range * (1 - y^2));
        # log(half_range) is part of the normaliser.
        log_prob: FloatArray = gaussian - np.log1p(-squashed * squashed).sum(axis=1)
        return log_prob


class NoisyTanh:
    """A deterministic action tanh(output), stretched to the action range, with Gaussian noise for exploration.

    Noise of different sizes explores more than noise of one size (PQL, arXiv 2307.12983). Workers do not know which
    environment of all theirs is, so here every step draws the deviation of its noise; `DeviceActor`, which has all
    environments, gives each a deviation of its own.
    """

    prepare = None

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...], noise_range: tuple[float, ...]):
        self.size = len(low)
        self._noise_range = noise_range
        lows, highs = np.array(low, np.float32), np.array(high, np.float32)
        self._centre, self._half_range = (highs + lows) / 2, (highs - lows) / 2

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        # The last column decides the deviation. From the same normal numbers, so that one long draw equals two short.
        columns = rng.standard_normal((num_steps, self.size + 1), np.float32)
        lowest, highest = self._noise_range
        # Phi(z) = (1 + erf(z / sqrt 2)) / 2 is uniform in [0, 1].
        uniform = [0.5 * (1 + math.erf(z / math.sqrt(2))) for z in columns[:, -1].tolist()]
        std = lowest + (highest - lowest) * np.array(uniform, np.float32)
        noise: FloatArray = columns[:, :-1] * std[:, None]
        return noise

    def decide(self, output: FloatArray, noise: FloatArray | None) -> Decision:
        action = np.tanh(output)
        if noise is not None:
            action = np.clip(action + noise, -1.0, 1.0)
        return Decision(self._centre + self._half_range * action, output)

    def single(self, forward: SingleForward) -> SingleAct:
        def act(obs: Array, noise: FloatArray, head: FloatArray) -> Any:
            forward(obs, head)
            # Two ufuncs are faster than `np.clip` on small arrays.
            action = np.minimum(np.maximum(np.tanh(head) + noise, -1.0), 1.0)
            return self._centre + self._half_range * action

        return act

    def log_prob(self, head: FloatArray, action: Array) -> FloatArray:
        """0: cut-off noise has no density at the ends, and nobody corrects for the probability of such actions."""
        return np.zeros(len(action), np.float32)
