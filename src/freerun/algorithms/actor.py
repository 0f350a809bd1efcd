"""The policy as workers run it: an MLP in numpy. A batch of one costs 27 µs here and 250–420 µs in torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from freerun.core import Array, Decision, EnvSpec, FloatArray, UserError

Activation = Literal["tanh", "relu"]
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
NORMALIZED_LIMIT = 10.0


@dataclass(frozen=True)
class ActorSpec:
    """The shape of a policy: enough to lay out its weights in one flat buffer."""

    obs_size: int
    hidden_sizes: tuple[int, ...]
    activation: Activation
    categories: tuple[int, ...]
    """Choices per discrete action; empty for a Gaussian."""
    gaussian_size: int
    normalize_obs: bool

    @classmethod
    def of(
        cls, env: EnvSpec, hidden_sizes: tuple[int, ...], activation: Activation, normalize_obs: bool = False
    ) -> ActorSpec:
        obs_size = int(np.prod(env.observation_space.shape))
        space = env.action_space
        categories: tuple[int, ...] = ()
        if isinstance(space, spaces.Discrete):
            categories = (int(space.n),)
        elif isinstance(space, spaces.MultiDiscrete):
            categories = tuple(int(n) for n in space.nvec)
        gaussian_size = 0 if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else int(np.prod(space.shape))
        return cls(obs_size, hidden_sizes, activation, categories, gaussian_size, normalize_obs)

    @property
    def output_size(self) -> int:
        return sum(self.categories) or self.gaussian_size

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays in the flat buffer, in order; layers are named as in torch."""
        sizes = (self.obs_size, *self.hidden_sizes, self.output_size)
        arrays: dict[str, tuple[int, ...]] = {}
        if self.normalize_obs:
            arrays = {"obs_mean": (self.obs_size,), "obs_scale": (self.obs_size,)}
        for layer, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
            arrays[f"{2 * layer}.weight"] = (num_out, num_in)
            arrays[f"{2 * layer}.bias"] = (num_out,)
        if self.gaussian_size:
            arrays["log_std"] = (self.gaussian_size,)
        return arrays


class MLPActor:
    """A `Policy` whose weights are views into one flat buffer."""

    def __init__(self, spec: ActorSpec, scalar_actions: bool, batch_invariant: bool = False):
        self.spec = spec
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._num_layers = len(spec.hidden_sizes) + 1
        self.weights = np.zeros(sum(int(np.prod(shape)) for shape in spec.layout().values()), np.float32)
        self._map()

    def describe(self) -> dict[str, Any]:
        return {"kind": "mlp", "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any]) -> MLPActor:
        """The reverse of `arrays` and `describe`."""
        fields = {**description}
        if fields.pop("kind", None) != "mlp":
            raise UserError(f"the policy is of a kind that this version of freerun does not know: {description}")
        scalar_actions = bool(fields.pop("scalar_actions"))
        for name in ("hidden_sizes", "categories"):
            fields[name] = tuple(fields[name])
        actor = cls(ActorSpec(**fields), scalar_actions)
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != actor.spec.layout():
            raise UserError(f"the policy's arrays {shapes} do not fit its description {actor.spec.layout()}")
        for name, array in actor.arrays.items():
            array[:] = arrays[name]
        return actor

    def _map(self) -> None:
        self.arrays: dict[str, FloatArray] = {}
        start = 0
        for name, shape in self.spec.layout().items():
            end = start + int(np.prod(shape))
            self.arrays[name] = self.weights[start:end].reshape(shape)
            start = end
        self._layers = [
            (self.arrays[f"{2 * layer}.weight"], self.arrays[f"{2 * layer}.bias"]) for layer in range(self._num_layers)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("arrays", "_layers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights

    def draw(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        if self.spec.gaussian_size:
            return rng.standard_normal((num_steps, self.spec.gaussian_size), np.float32)
        return rng.random((num_steps, len(self.spec.categories)), np.float32)

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        num_rows = len(obs)
        if self._batch_invariant and num_rows > 1:
            # A matrix product of another height may round differently: one row at a time gives the same bits
            # however many environments share the call.
            rows = [self.act(obs[i : i + 1], None if noise is None else noise[i : i + 1]) for i in range(num_rows)]
            return Decision(*(np.concatenate(column) for column in zip(*rows, strict=True)))
        output = self._forward(obs.reshape(-1) if num_rows == 1 else obs.reshape(num_rows, -1)).reshape(num_rows, -1)
        return self._gaussian(output, noise) if self.spec.gaussian_size else self._categorical(output, noise)

    def _forward(self, x: Array) -> FloatArray:
        """One observation [obs_size], for which a matrix-vector product is fastest, or many [B, obs_size]."""
        if self.spec.normalize_obs:
            x = (x - self.arrays["obs_mean"]) * self.arrays["obs_scale"]
            np.minimum(x, NORMALIZED_LIMIT, out=x)
            np.maximum(x, -NORMALIZED_LIMIT, out=x)
        last = len(self._layers) - 1
        for layer, (weight, bias) in enumerate(self._layers):
            x = weight.dot(x) if x.ndim == 1 else x.dot(weight.T)
            x += bias
            if layer < last:
                if self.spec.activation == "tanh":
                    np.tanh(x, out=x)
                else:
                    np.maximum(x, 0.0, out=x)
        return x

    def _categorical(self, logits: FloatArray, noise: FloatArray | None) -> Decision:
        actions, log_probs = [], []
        for row, row_logits in enumerate(logits):
            choices, log_prob, start = [], 0.0, 0
            for column, num_choices in enumerate(self.spec.categories):
                part = row_logits[start : start + num_choices]
                choice, part_log_prob = _choose(part, None if noise is None else noise.item(row, column))
                choices.append(choice)
                log_prob += part_log_prob
                start += num_choices
            actions.append(choices[0] if self._scalar_actions else choices)
            log_probs.append(log_prob)
        return Decision(np.array(actions), np.array(log_probs, np.float32))

    def _gaussian(self, mean: FloatArray, noise: FloatArray | None) -> Decision:
        log_std = self.arrays["log_std"]
        if noise is None:
            noise = np.zeros_like(mean)
        action = mean + np.exp(log_std) * noise
        log_prob = -0.5 * (noise * noise).sum(axis=1) - (log_std.sum() + np.float32(LOG_SQRT_2PI * len(log_std)))
        return Decision(action, log_prob)


def _choose(logits: FloatArray, noise: float | None) -> tuple[int, float]:
    """A category and its log-probability. Few numpy calls: with cold caches each costs a worker several µs."""
    best = int(logits.argmax())  # and not `max`, which takes five times as long
    logits = logits - logits[best]
    cumulative = np.exp(logits).cumsum()
    total = cumulative.item(-1)
    choice = best
    if noise is not None:
        # Inverse transform: the first category whose cumulative weight exceeds noise × total.
        choice = min(int(cumulative.searchsorted(noise * total, "right")), len(logits) - 1)
    return choice, logits.item(choice) - math.log(total)
