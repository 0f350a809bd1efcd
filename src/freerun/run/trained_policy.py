"""A trained policy to act with. It turns an observation of its environment into an action for `env.step`, in numpy.

This module needs numpy and Gymnasium alone, because robots run it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gymnasium import spaces

from freerun.adapters.action_masks import MASK_KEY, MaskReader
from freerun.adapters.space_adapter import (
    POLICY_GROUP,
    SpaceAdapter,
    has_groups,
    names_without_mask,
    policy_part,
    without_mask,
)
from freerun.core import Array, Decision, EnvSpaces, FloatArray, Policy, UserError, as_memory_policy

if TYPE_CHECKING:
    from freerun.settings.config import AnyConfig

Settings = Callable[[Sequence[str]], "AnyConfig"]
"""Returns the settings of a policy's run, for a list of code that the user trusts."""


def own_settings(config: AnyConfig, trust: Sequence[str]) -> AnyConfig:
    """Return the settings of a run of this very process: its code needs nobody's trust."""
    return config


class TrainedPolicy:
    """Takes observations as the environment gives them, and returns actions as the environment takes them.

    It flattens and normalises observations, and clips or scales actions, as training did.
    """

    def __init__(self, actor: Policy, env_spaces: EnvSpaces, settings: Settings, seed: int | None = None):
        self.actor = actor
        """The policy as workers use it. It takes flat observations, and its actions are not clipped yet."""
        self.has_mask = bool(actor.describe().get("has_mask", False))
        """True if `predict` must be told which actions are allowed."""
        self._remembering = as_memory_policy(actor)
        self._names = names_without_mask(env_spaces.observation) if self.has_mask else ()
        self.observation_space, self.action_space = policy_part(env_spaces, self.has_mask), env_spaces.action
        self._has_groups = has_groups(without_mask(env_spaces.observation) if self.has_mask else env_spaces.observation)
        self.settings = settings
        self._rng = np.random.default_rng(seed)

    @functools.cached_property
    def _adapter(self) -> SpaceAdapter:
        return SpaceAdapter(self.observation_space, self.action_space)

    @property
    def weights(self) -> FloatArray:
        """All weights and normaliser statistics in one flat array."""
        return self.actor.weights

    @property
    def memory_size(self) -> int:
        """How many numbers the policy remembers from step to step: 0 without `--memory`."""
        return 0 if self._remembering is None else self._remembering.memory_size

    def new_memory(self, num_envs: int | None = None) -> FloatArray:
        """Return what a policy with a memory remembers at the start of an episode, or of one in each environment."""
        if not self.memory_size:
            raise UserError("this policy was trained without --memory: it remembers nothing")
        return np.zeros(self.memory_size if num_envs is None else (num_envs, self.memory_size), np.float32)

    def predict(
        self, obs: Any, deterministic: bool = True, action_mask: Any = None, memory: FloatArray | None = None
    ) -> Any:
        """Return the action for one observation, or the actions for a batch, which has one more axis in front.

        With `deterministic=False`, actions are sampled as in training. A policy that was trained with masks needs the
        `action_mask` of each observation, unless the observation itself contains it. One that was trained with
        `--memory` needs its `memory` of the episode: a `new_memory()`, which every step changes in place.
        """
        rows, is_batch = self._read(obs, action_mask)
        noise = None if deterministic else self.actor.draw(self._rng, len(rows))
        actions: Any = self._decide(rows, noise, memory).action if len(rows) else ()
        convert = self._adapter.convert_action
        # Clip to the range of the action space (PPO) or scale to it (SAC), and count choices from the space's start.
        converted = [convert(action) for action in actions] if convert is not None else list(actions)
        if is_batch:
            space = self.action_space
            return np.array(converted, space.dtype).reshape(len(converted), *(space.shape or ()))
        # A plain int for a Discrete space, as docs/deploy.md promises.
        return int(converted[0]) if isinstance(self.action_space, spaces.Discrete) else converted[0]

    __call__ = predict

    @property
    def has_logits(self) -> bool:
        """True if actions are discrete choices."""
        return not isinstance(self.action_space, spaces.Box)

    def _decide(self, rows: Array, noise: FloatArray | None, memory: FloatArray | None) -> Decision:
        if self._remembering is None:
            if memory is not None:
                raise UserError("this policy was trained without --memory: leave memory out")
            return self.actor.act(rows, noise)
        if memory is None:
            raise UserError(
                "this policy was trained with --memory: give predict(obs, memory=memory), where memory is "
                "policy.new_memory() at the start of an episode, and the same array at each of its steps"
            )
        shape = (len(rows), self.memory_size)
        is_usable = isinstance(memory, np.ndarray) and memory.dtype == np.float32 and memory.flags.c_contiguous
        if not is_usable or memory.shape not in (shape, shape[1:] if len(rows) == 1 else shape):
            raise UserError(f"memory must be an array of float32 of shape {shape}, as policy.new_memory() returns it")
        return self._remembering.act_from(rows, noise, memory.reshape(shape))

    def logits(self, obs: Any, action_mask: Any = None, memory: FloatArray | None = None) -> FloatArray:
        """Return a number per choice, of which the largest is the choice that `predict` makes.

        The choices of several discrete actions stand one after another. A `memory` is changed as by `predict`.
        """
        if not self.has_logits:
            raise UserError(f"actions of {self.action_space} are no choices, so they have no logits: use predict()")
        rows, is_batch = self._read(obs, action_mask)
        if not len(rows):
            return np.zeros((0, self.actor.head_size), np.float32)
        logits = self._decide(rows, None, memory).head
        return logits if is_batch else logits[0]

    def act(self, *_: object, **__: object) -> NoReturn:
        raise UserError("a trained policy has no act(): call policy.predict(obs), with one observation or a batch")

    def seen_part(self, obs: Any) -> Any:
        """Return what the policy sees of an observation of its environment, or of a batch of them."""
        if self._names:
            obs, _ = _split_mask(obs, None, self._names)
        return _policy_group(obs) if self._has_groups else obs

    def _read(self, obs: Any, action_mask: Any) -> tuple[Array, bool]:
        """Return the observations as rows for the actor, and whether they were a batch."""
        adapter, space = self._adapter, self.observation_space
        if self._names:
            _, action_mask = _split_mask(obs, action_mask, self._names)
        obs = self.seen_part(obs)
        shape = adapter.spec.observation_space.shape
        try:
            if isinstance(space, spaces.Box):  # the usual case, without a loop over the rows of a batch
                batch = adapter.read(obs)
                is_batch = batch.shape != shape
                rows = batch if is_batch else batch[None]
            else:
                elements = _elements(space, obs)
                is_batch = elements is not None
                found = [adapter.read(element) for element in ([obs] if elements is None else elements)]
                rows = np.array(found, adapter.spec.observation_space.dtype).reshape(len(found), *shape)
            if rows.shape[1:] != shape:
                raise ValueError(f"its shape is {rows.shape}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"the policy takes an observation of {space}, or a batch of them with one more axis in front; "
                f"this is neither: {reason}"
            ) from None
        return self._with_mask(rows, is_batch, action_mask), is_batch

    def _with_mask(self, rows: Array, is_batch: bool, action_mask: Any) -> Array:
        """Append to each row its mask, as training does."""
        if not self.has_mask:
            if action_mask is not None:
                raise UserError("this policy was trained without action masks: leave action_mask out")
            return rows
        if action_mask is None:
            raise UserError(f"this policy was trained with action masks: give predict(obs, {MASK_KEY}=...)")
        reader = MaskReader(self._adapter.spec.action_space)
        try:
            masks = [reader.read(mask) for mask in (action_mask if is_batch else [action_mask])]
            if len(masks) != len(rows):
                raise ValueError(f"there are {len(masks)} masks for {len(rows)} observations")
        except (TypeError, ValueError) as error:
            raise UserError(f"{MASK_KEY} cannot be used: {error}") from None
        if not all(map(reader.allows_something, masks)):
            raise UserError(f"{MASK_KEY} forbids every action: allow at least one")
        masked = np.array(masks, rows.dtype).reshape(len(rows), reader.size)
        return np.concatenate([rows.reshape(len(rows), -1), masked], axis=1)


def _split_mask(obs: Any, mask: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Take the masks out of an observation or of a batch, if they are there. `names` are its other parts."""
    if isinstance(obs, list | tuple) and obs and all(isinstance(one, Mapping) and MASK_KEY in one for one in obs):
        pairs = [_split_mask(one, None, names) for one in obs]
        return [part for part, _ in pairs], [found for _, found in pairs] if mask is None else mask
    if not isinstance(obs, Mapping) or MASK_KEY not in obs:
        return obs, mask
    rest = obs[names[0]] if len(names) == 1 else {name: obs[name] for name in names}
    return rest, obs[MASK_KEY] if mask is None else mask


def _policy_group(obs: Any) -> Any:
    """What the policy sees of one observation or of a batch, which need not hold what only the value function sees."""
    if isinstance(obs, list | tuple):
        return [_policy_group(element) for element in obs]
    return obs[POLICY_GROUP] if isinstance(obs, Mapping) and POLICY_GROUP in obs else obs


def _elements(space: spaces.Space[Any], value: Any) -> list[Any] | None:
    """Return the elements of a batch; None for a single element. A batch of dictionaries may also be a dictionary of
    batches."""
    # A dictionary of batches becomes a list of dictionaries, one per element of the batch.
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        parts = [_elements(space[name], value[name]) for name in space]
        rows = _zipped(parts)
        return None if rows is None else [dict(zip(space, row, strict=True)) for row in rows]
    if isinstance(space, spaces.Tuple) and isinstance(value, tuple) and len(value) == len(space):
        return _zipped([_elements(part, one) for part, one in zip(space, value, strict=True)])
    if isinstance(space, spaces.Dict | spaces.Tuple) or space.shape is None:
        if value in space:
            return None
        elements = list(value)
        # What looks like a batch must consist of single elements.
        if any(_elements(space, element) is not None for element in elements):
            raise ValueError("it is a batch of batches")
        return elements
    array = np.asarray(value)
    if array.shape == space.shape:
        return None
    if array.shape[1:] != space.shape:
        raise ValueError(f"a part has shape {array.shape}, not {space.shape}")
    return list(array)


def _zipped(parts: Sequence[list[Any] | None]) -> list[tuple[Any, ...]] | None:
    # All parts must be batches, or none of them.
    batches = [part for part in parts if part is not None]
    if not batches:
        return None
    if len(batches) < len(parts):
        raise ValueError("some of its parts are batches and some are not")
    return list(zip(*batches, strict=True))
