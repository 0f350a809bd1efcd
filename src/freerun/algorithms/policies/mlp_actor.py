"""The policy that workers run: an MLP in numpy. `benchmarks/overhead.py` measures what a step with it costs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from gymnasium import spaces

from freerun.algorithms.policies.action_heads import (
    ActionHead,
    Categorical,
    Gaussian,
    InverseCDFCategorical,
    NoisyTanh,
    SingleAct,
    SingleForward,
    SquashedGaussian,
    mask_logits,
    with_preparation,
)
from freerun.algorithms.policies.epsilon_greedy import EpsilonGreedy
from freerun.algorithms.policies.output_cache import OutputCache
from freerun.core import Array, Decision, EnvSpec, FloatArray, Policy, TensorActor, UserError, require_positive

if TYPE_CHECKING:
    import torch
    from torch import nn

Activation = Literal["tanh", "relu", "elu"]
HiddenActivation = Literal["tanh", "relu", "elu", "normalized-relu"]
"""The activations that users choose from, and layer normalisation with a ReLU behind it."""
NORM_EPSILON = 1e-5
"""What torch's layer normalisation adds to the variance."""
NORMALIZED_LIMIT = 10.0
"""Normalised observations and scaled rewards are clipped to this many standard deviations."""
SIZES = ("obs_size", "categories", "gaussian_size")
"""The sizes that a network and its environment must share."""
MAX_GUMBEL_CHOICES = 64
"""Up to this many choices, one Gumbel number for each is cheaper than the cumulative distribution."""


@dataclass(frozen=True)
class ActorSpec:
    """The shape of a policy. It determines how the weights lie in the flat buffer."""

    obs_size: int
    hidden_sizes: tuple[int, ...]
    activation: HiddenActivation
    categories: tuple[int, ...]
    """The number of choices of each discrete action; empty for a Gaussian."""
    gaussian_size: int
    """The number of continuous actions; 0 for discrete ones."""
    normalize_obs: bool
    low: tuple[float, ...] = ()
    """The lower ends of the action ranges of a squashed Gaussian; empty for other distributions."""
    high: tuple[float, ...] = ()
    """The upper ends."""
    noise_range: tuple[float, ...] = ()
    """Of a deterministic policy within these ranges: the lowest and the highest deviation of its exploration noise, for
    actions in [-1, 1]. Empty for other policies."""
    critic_obs_size: int = 0
    """How many numbers stand behind those that the policy sees in an observation: the critic's group of an
    `EnvSpec.obs_groups`. The policy also takes observations without them."""
    has_mask: bool = False
    """Whether the last numbers of an observation, one per choice, say which choices are allowed."""
    epsilon_greedy: bool = False
    """The outputs are the values of the choices of one discrete action. The policy takes the best one, or a random one
    with the probability `epsilon`, which is one of its weights."""

    def __post_init__(self) -> None:
        require_positive(self, "hidden_sizes")

    @classmethod
    def squashed(
        cls, env: EnvSpec, hidden_sizes: tuple[int, ...], activation: HiddenActivation, normalize_obs: bool = False
    ) -> ActorSpec:
        """A Gaussian that stays within the action range, with a deviation that depends on the observation."""
        space = env.action_space
        if not isinstance(space, spaces.Box) or not space.is_bounded():
            raise UserError(
                f"this algorithm needs actions in a bounded Box, not {space}: choose --algo ppo, or set limits "
                "(Isaac Lab, RSL-RL, mjlab: --env-args clip_actions 1.0)"
            )
        spec = cls.of(env, hidden_sizes, activation, normalize_obs)
        return replace(spec, low=tuple(space.low.ravel().tolist()), high=tuple(space.high.ravel().tolist()))

    @classmethod
    def of(
        cls, env: EnvSpec, hidden_sizes: tuple[int, ...], activation: HiddenActivation, normalize_obs: bool = False
    ) -> ActorSpec:
        """Categories for discrete actions, and a Gaussian without squashing for a Box."""
        space = env.action_space
        categories: tuple[int, ...] = ()
        gaussian_size = 0
        if isinstance(space, spaces.Discrete):
            categories = (int(space.n),)
        elif isinstance(space, spaces.MultiDiscrete):
            categories = tuple(int(n) for n in space.nvec)
        else:
            gaussian_size = math.prod(space.shape)
        obs_size = math.prod(env.policy_space.shape)
        return cls(
            obs_size,
            hidden_sizes,
            activation,
            categories,
            gaussian_size,
            normalize_obs,
            critic_obs_size=math.prod(env.critic_space.shape) if env.has_critic_group else 0,
            has_mask=env.has_mask,
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ActorSpec:
        """A spec from JSON, where tuples have become lists."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    def fits(self, env: EnvSpec) -> bool:
        """True if a policy of this shape takes the observations of an environment and chooses its actions."""
        wanted = self.of(env, self.hidden_sizes, self.activation)
        return all(getattr(wanted, name) == getattr(self, name) for name in SIZES)

    @property
    def has_more_than_policy_sees(self) -> bool:
        """True if numbers stand in an observation behind those that the policy sees."""
        return bool(self.critic_obs_size) or self.has_mask

    @property
    def row_size(self) -> int:
        """The numbers of a whole observation: what the policy sees, and what stands behind that."""
        return self.obs_size + self.critic_obs_size + (self.output_size if self.has_mask else 0)

    @property
    def output_size(self) -> int:
        """One logit per choice, or a mean per action, and for a squashed Gaussian also a log(std)."""
        return sum(self.categories) or self.gaussian_size * (2 if self.low and not self.noise_range else 1)

    def make_head(self, scalar_actions: bool) -> ActionHead:
        if self.epsilon_greedy:
            return EpsilonGreedy(self.categories[0], self.has_mask)
        if self.noise_range:
            return NoisyTanh(self.low, self.high, self.noise_range)
        if self.low:
            return SquashedGaussian(self.low, self.high)
        if not self.categories:
            return Gaussian(self.gaussian_size)
        kind = Categorical if sum(self.categories) <= MAX_GUMBEL_CHOICES else InverseCDFCategorical
        return kind(self.categories, scalar_actions)

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays in the flat buffer, in order. Layers are named as in `torch.nn.Sequential`."""
        sizes = (self.obs_size, *self.hidden_sizes, self.output_size)
        arrays: dict[str, tuple[int, ...]] = {}
        if self.normalize_obs:
            arrays = {"obs_mean": (self.obs_size,), "obs_scale": (self.obs_size,)}
        for layer, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
            arrays[f"{2 * layer}.weight"] = (num_out, num_in)
            arrays[f"{2 * layer}.bias"] = (num_out,)
        if self.gaussian_size and not self.low:
            arrays["log_std"] = (self.gaussian_size,)
        if self.epsilon_greedy:
            arrays["epsilon"] = (1,)
        return arrays


Flat = TypeVar("Flat", FloatArray, "torch.Tensor")


def named_views(flat: Flat, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Flat]:
    """Views into a flat array or tensor, one after another, by name."""
    views: dict[str, Flat] = {}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        views[name] = flat[start:end].reshape(shape)
        start = end
    return views


def flat_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def elu(x: FloatArray, out: FloatArray) -> None:
    """x where it is above 0, and exp(x) - 1 elsewhere (Clevert et al. 2016, alpha = 1); `out` may be x itself."""
    negative = np.minimum(x, np.float32(0))
    np.expm1(negative, out=negative)
    np.maximum(x, np.float32(0), out=out)
    out += negative


def normalized_relu(x: FloatArray, out: FloatArray) -> None:
    """Layer normalisation without weights of its own, then a ReLU: the next layer can scale and shift by itself."""
    # y = max(0, (x - mean) / sqrt(variance + epsilon)), over the last axis
    np.subtract(x, x.mean(axis=-1, keepdims=True), out=out)
    out /= np.sqrt(np.square(out).mean(axis=-1, keepdims=True) + np.float32(NORM_EPSILON))
    np.maximum(out, np.float32(0), out=out)


def activation_function(name: HiddenActivation) -> Callable[..., Any]:
    """A function of an array and `out`, the array to write to."""
    activations: dict[HiddenActivation, Callable[..., Any]] = {
        "tanh": np.tanh,
        "relu": functools.partial(np.maximum, np.float32(0)),
        "elu": elu,
        "normalized-relu": normalized_relu,
    }
    return activations[name]


def normalizer(arrays: Mapping[str, FloatArray]) -> Callable[[FloatArray], None]:
    """x <- clip((x - mean) / std), in place, with the statistics of a policy's arrays; `obs_scale` is 1 / std."""
    mean, scale = arrays["obs_mean"], arrays["obs_scale"]

    def normalize(x: FloatArray) -> None:
        x -= mean
        x *= scale
        np.minimum(x, NORMALIZED_LIMIT, out=x)
        np.maximum(x, -NORMALIZED_LIMIT, out=x)

    return normalize


class MLPActor:
    """A `Policy` whose weights are views into one flat buffer."""

    def __init__(self, spec: ActorSpec, scalar_actions: bool, batch_invariant: bool = False):
        """With `batch_invariant`, an action does not depend on how many observations share the call."""
        self.spec = spec
        self._scalar_actions = scalar_actions
        self._batch_invariant = batch_invariant
        self._head = spec.make_head(scalar_actions)
        self.head_size = self._head.size
        self.draw = self._head.draw
        self.decide = self._head.decide
        self.log_prob = self._head.log_prob
        layout = spec.layout()
        self.weights = np.zeros(flat_size(layout), np.float32)
        self.arrays: dict[str, FloatArray] = named_views(self.weights, layout)
        self._layers = [
            (self.arrays[f"{2 * layer}.weight"], self.arrays[f"{2 * layer}.bias"])
            for layer in range(len(spec.hidden_sizes) + 1)
        ]
        # For one observation, a layer is a single product [W b] @ [x 1]: the bias is a further column of the weights,
        # and the input of every layer ends with a 1. All memory of a forward pass is allocated here, once.
        self._augmented = [np.zeros((len(bias), weight.shape[1] + 1), np.float32) for weight, bias in self._layers]
        self._normalize = normalizer(self.arrays) if spec.normalize_obs else None
        self._forward_single = self._make_forward_single()
        self._forward_prepared = with_preparation(self._forward_single, self._head)
        self._output_cache = OutputCache(self._forward_prepared)
        self._refresh()

    def on(self, device: torch.device, seed: int) -> TensorActor:
        from freerun.algorithms.policies.device_actor import DeviceActor  # workers do not import torch

        return DeviceActor(self.spec, None, self.arrays, self._scalar_actions, device, seed)

    def batched_on(self, device: str) -> Policy:
        from freerun.algorithms.policies.batched_actor import BatchedActor  # workers do not import torch

        return BatchedActor(self, device)

    def torch_network(self) -> nn.Module:
        """Return a copy of the network in torch, for export: normalised observations -> outputs."""
        from freerun.algorithms.policies.networks import mlp_from

        return mlp_from(self.spec, self.arrays)

    def describe(self) -> dict[str, Any]:
        return {"kind": "mlp", "scalar_actions": self._scalar_actions, **asdict(self.spec)}

    @classmethod
    def restore(cls, arrays: Mapping[str, Array], description: Mapping[str, Any]) -> MLPActor:
        """A policy from what `arrays` and `describe` of another one have returned."""
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

    def fits(self, env: EnvSpec) -> bool:
        """True if it takes the observations of an environment and chooses its actions."""
        return self.spec.fits(env)

    def __getstate__(self) -> tuple[Any, ...]:
        # Views and closures cannot be pickled; `__init__` makes them again.
        return self.spec, self._scalar_actions, self._batch_invariant, self.weights

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *arguments, weights = state
        self.__init__(*arguments)  # type: ignore[misc]
        self.load(weights)

    def load(self, weights: FloatArray) -> None:
        self.weights[:] = weights
        self._refresh()

    def _refresh(self) -> None:
        """Bring everything up to date that depends on the weights."""
        self._output_cache.clear()
        for augmented, (weight, bias) in zip(self._augmented, self._layers, strict=True):
            # Copies, into arrays that stay: `_make_forward_single` has bound their `dot`.
            augmented[:, :-1] = weight
            augmented[:, -1] = bias
        if isinstance(self._head, Gaussian):
            self._head.load(self.arrays["log_std"])
        elif isinstance(self._head, EpsilonGreedy):
            self._head.epsilon = self.arrays["epsilon"].item()

    def act(self, obs: Array, noise: FloatArray | None) -> Decision:
        num_rows = len(obs)
        if num_rows == 1 or self._batch_invariant:
            # A matrix product of another height may round differently. One row at a time gives the same bits however
            # many environments share the call.
            output = np.empty((num_rows, self.spec.output_size), np.float32)
            for row in range(num_rows):
                self._forward_single(obs[row], output[row])
        else:
            rows = obs.reshape(num_rows, -1)
            output = self._forward(rows[:, : self.spec.obs_size] if self.spec.has_more_than_policy_sees else rows)
            if self.spec.has_mask:
                mask_logits(output, rows)
        return self._head.decide(output, noise)

    def single(self) -> SingleAct:
        return self._head.single(self._output_cache if self._output_cache.is_useful else self._forward_prepared)

    def _make_forward_single(self) -> SingleForward:
        """The forward pass for one observation, with everything bound to local names.

        With cold processor caches each attribute lookup and each call costs microseconds.
        """
        inputs = [np.ones(augmented.shape[1], np.float32) for augmented in self._augmented]
        outputs = [layer_input[:-1] for layer_input in inputs[1:]]  # a layer writes into the input of the next
        obs_input, normalize = inputs[0][:-1], self._normalize
        activate = activation_function(self.spec.activation)
        dots = [augmented.dot for augmented in self._augmented]
        hidden = tuple(zip(dots[:-1], inputs[:-1], outputs, strict=True))
        last_dot, last_input = dots[-1], inputs[-1]
        seen = slice(self.spec.obs_size) if self.spec.has_more_than_policy_sees else None
        has_mask = self.spec.has_mask

        def forward_single(obs: Array, output: FloatArray) -> None:
            row = obs
            if seen is not None:
                obs = obs.reshape(-1)[seen]
            obs_input[...] = obs if obs.ndim == 1 else obs.reshape(-1)
            if normalize is not None:
                normalize(obs_input)
            for dot, layer_input, layer_output in hidden:
                dot(layer_input, layer_output)
                activate(layer_output, out=layer_output)
            last_dot(last_input, output)
            if has_mask:
                mask_logits(output, row)

        return forward_single

    def _forward(self, x: Array) -> FloatArray:
        """[B, obs_size] -> [B, outputs]."""
        if self._normalize is not None:
            x = x.astype(np.float32)
            self._normalize(x)
        last, activate = len(self._layers) - 1, activation_function(self.spec.activation)
        for layer, (weight, bias) in enumerate(self._layers):
            x = x.dot(weight.T)
            x += bias
            if layer < last:
                activate(x, out=x)
        return x
