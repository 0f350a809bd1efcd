"""The policy as workers run it: an MLP in numpy (`benchmarks/overhead.py` says what a step costs with it)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import spaces

from freerun.algorithms.heads import (
    Categorical,
    Forward,
    Gaussian,
    Head,
    ManyChoices,
    Single,
    SquashedGaussian,
    prepared,
)
from freerun.algorithms.recall import Recall
from freerun.core import Array, Decision, EnvSpec, FloatArray, TensorActor, UserError, require_positive

if TYPE_CHECKING:
    import torch

Activation = Literal["tanh", "relu"]
NORMALIZED_LIMIT = 10.0
FEW_CHOICES = 64
"""Up to so many it is cheaper to draw noise for each."""


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
    low: tuple[float, ...] = ()
    """The range of the actions of a squashed Gaussian; empty for one that is not."""
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "hidden_sizes")

    @classmethod
    def squashed(cls, env: EnvSpec, hidden_sizes: tuple[int, ...], activation: Activation) -> ActorSpec:
        """A Gaussian that keeps to the range of the actions, with a deviation that depends on the observation."""
        space = env.action_space
        if not isinstance(space, spaces.Box) or not space.is_bounded():
            raise UserError(f"this algorithm needs actions in a bounded Box, not {space}: choose --algo ppo")
        spec = cls.of(env, hidden_sizes, activation)
        return replace(spec, low=tuple(space.low.ravel().tolist()), high=tuple(space.high.ravel().tolist()))

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

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ActorSpec:
        """From JSON, which has no tuples."""
        kept: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**kept)

    @property
    def output_size(self) -> int:
        return sum(self.categories) or self.gaussian_size * (2 if self.low else 1)

    def make_head(self, scalar_actions: bool) -> Head:
        if self.low:
            return SquashedGaussian(self.low, self.high)
        if not self.categories:
            return Gaussian(self.gaussian_size)
        kind = Categorical if sum(self.categories) <= FEW_CHOICES else ManyChoices
        return kind(self.categories, scalar_actions)

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays in the flat buffer, in order; layers are named as in torch."""
        sizes = (self.obs_size, *self.hidden_sizes, self.output_size)
        arrays: dict[str, tuple[int, ...]] = {}
        if self.normalize_obs:
            arrays = {"obs_mean": (self.obs_size,), "obs_scale": (self.obs_size,)}
        for layer, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
            arrays[f"{2 * layer}.weight"] = (num_out, num_in)
            arrays[f"{2 * layer}.bias"] = (num_out,)
        if self.gaussian_size and not self.low:
            arrays["log_std"] = (self.gaussian_size,)
        return arrays


class MLPActor:
    """A `Policy` whose weights are views into one flat buffer."""

    def __init__(self, spec: ActorSpec, scalar_actions: bool, batch_invariant: bool = False):
        self.spec = spec
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._head = spec.make_head(scalar_actions)
        self.head_size = self._head.size
        self.draw = self._head.draw
        self.log_prob = self._head.log_prob
        self.weights = np.zeros(sum(int(np.prod(shape)) for shape in spec.layout().values()), np.float32)
        self._map()

    def on(self, device: torch.device, seed: int) -> TensorActor:
        from freerun.algorithms.tensor_actor import DeviceActor  # workers do without torch

        return DeviceActor(self.spec, None, self.arrays, self._scalar_actions, device, seed)

    def describe(self) -> dict[str, Any]:
        return {"kind": "mlp", "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any]) -> MLPActor:
        """The reverse of `arrays` and `describe`."""
        fields = {**description}
        if fields.pop("kind", None) != "mlp":
            raise UserError(f"the policy is of a kind that this version of freerun does not know: {description}")
        scalar_actions = bool(fields.pop("scalar_actions"))
        actor = cls(ActorSpec.read(fields), scalar_actions)
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != actor.spec.layout():
            raise UserError(f"the policy's arrays {shapes} do not fit its description {actor.spec.layout()}")
        actor.load(np.concatenate([arrays[name].reshape(-1) for name in actor.arrays]))
        return actor

    def _map(self) -> None:
        """Name the parts of the flat buffer, and lay out the memory of a forward pass."""
        self.arrays: dict[str, FloatArray] = {}
        start = 0
        for name, shape in self.spec.layout().items():
            end = start + int(np.prod(shape))
            self.arrays[name] = self.weights[start:end].reshape(shape)
            start = end
        num_layers = len(self.spec.hidden_sizes) + 1
        self._layers = [(self.arrays[f"{2 * n}.weight"], self.arrays[f"{2 * n}.bias"]) for n in range(num_layers)]
        # For one observation: the bias is one more column of the weights, and every layer's input ends with a 1.
        self._folded = [np.zeros((len(bias), weight.shape[1] + 1), np.float32) for weight, bias in self._layers]
        self._inputs = [np.ones(folded.shape[1], np.float32) for folded in self._folded]
        self._outputs = [layer_input[:-1] for layer_input in self._inputs[1:]]
        self._first_input = self._inputs[0][:-1]
        self._forward_one = self._make_forward_one()
        self._prepared = prepared(self._forward_one, self._head)
        self._recall = Recall(self._prepared)
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("spec", "_scalar_actions", "_batch_invariant", "weights")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["spec"], state["_scalar_actions"], state["_batch_invariant"])  # type: ignore[misc]
        self.load(state["weights"])

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        self._prepare()

    def _prepare(self) -> None:
        self._recall.forget()
        for folded, (weight, bias) in zip(self._folded, self._layers, strict=True):
            folded[:, :-1] = weight
            folded[:, -1] = bias
        if isinstance(self._head, Gaussian):
            self._head.load(self.arrays["log_std"])

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        num_rows = len(obs)
        if num_rows == 1 or self._batch_invariant:
            # A matrix product of another height may round differently: one row at a time gives the same bits
            # however many environments share the call.
            output = np.empty((num_rows, self.spec.output_size), np.float32)
            for row in range(num_rows):
                self._forward_one(obs[row], output[row])
        else:
            output = self._forward(obs.reshape(num_rows, -1))
        return self._head.choose(output, noise)

    def single(self) -> Single:
        return self._head.single(self._recall if self._recall.is_useful else self._prepared)

    def _make_forward_one(self) -> Forward:
        """For one observation, with all it needs at hand: with cold caches each lookup and each call costs µs."""
        first, normalize = self._first_input, self._normalize if self.spec.normalize_obs else None
        activate = np.tanh if self.spec.activation == "tanh" else functools.partial(np.maximum, np.float32(0))
        dots = [folded.dot for folded in self._folded]
        hidden = tuple(zip(dots[:-1], self._inputs[:-1], self._outputs, strict=True))
        last_dot, last_input = dots[-1], self._inputs[-1]

        def forward_one(obs: Array, output: FloatArray) -> None:
            first[...] = obs if obs.ndim == 1 else obs.reshape(-1)
            if normalize is not None:
                normalize(first)
            for dot, layer_input, layer_output in hidden:
                dot(layer_input, layer_output)
                activate(layer_output, out=layer_output)
            last_dot(last_input, output)

        return forward_one

    def _forward(self, x: Array) -> FloatArray:
        """[B, obs_size] -> [B, outputs]."""
        if self.spec.normalize_obs:
            x = x.astype(np.float32)
            self._normalize(x)
        last = len(self._layers) - 1
        for layer, (weight, bias) in enumerate(self._layers):
            x = x.dot(weight.T)
            x += bias
            if layer < last:
                self._activate(x)
        return x

    def _activate(self, x: FloatArray) -> None:
        if self.spec.activation == "tanh":
            np.tanh(x, x)
        else:
            np.maximum(x, 0.0, out=x)

    def _normalize(self, x: FloatArray) -> None:
        x -= self.arrays["obs_mean"]
        x *= self.arrays["obs_scale"]
        np.minimum(x, NORMALIZED_LIMIT, out=x)
        np.maximum(x, -NORMALIZED_LIMIT, out=x)
