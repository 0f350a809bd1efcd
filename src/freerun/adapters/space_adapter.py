"""Converts between an environment's own spaces and the plain arrays that a policy sees and chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from freerun.adapters.action_masks import MASK_KEY
from freerun.adapters.images import image_parts
from freerun.core import ActionSpace, Array, EnvSpaces, EnvSpec, ObsGroups, UserError, mask_space

POLICY_GROUP, CRITIC_GROUP = "policy", "critic"
"""The names of the two groups of observations, as in Isaac Lab and RSL-RL."""


def has_groups(space: spaces.Space[Any]) -> bool:
    """True for a Dict of what the policy sees and what only the value function sees, and of nothing else."""
    return isinstance(space, spaces.Dict) and set(space) == {POLICY_GROUP, CRITIC_GROUP}


def policy_part(env_spaces: EnvSpaces, has_mask: bool) -> spaces.Space[Any]:
    """What the policy sees of an observation, in the environment's own words. No network sees a mask."""
    space = without_mask(env_spaces.observation) if has_mask else env_spaces.observation
    return space[POLICY_GROUP] if isinstance(space, spaces.Dict) and has_groups(space) else space


def names_without_mask(space: spaces.Space[Any]) -> tuple[str, ...]:
    """The names of the other parts, if an observation is a Dict with a mask; otherwise nothing."""
    has_it = isinstance(space, spaces.Dict) and MASK_KEY in space.spaces
    return tuple(name for name in space if name != MASK_KEY) if has_it else ()  # type: ignore[attr-defined]


def without_mask(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The observations without their mask: the other part itself if there is only one, otherwise a Dict."""
    names = names_without_mask(space)
    if not names or not isinstance(space, spaces.Dict):
        return space
    return space[names[0]] if len(names) == 1 else spaces.Dict([(name, space[name]) for name in names])


class SpaceAdapter:
    """Converts the observations and actions of one environment.

    Training and deployment share this code, so that a deployed policy sees what it has learned from."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        max_episode_steps: int | None = None,
        policy_group_only: bool = False,
        has_mask: bool = False,
    ):
        """With `policy_group_only`, observations of two groups are cut down to what the policy sees. With `has_mask`,
        they end with the mask of the actions that are allowed."""
        self._names = names_without_mask(observation_space) if has_mask else ()
        observation_space = without_mask(observation_space) if has_mask else observation_space
        self._groups = (
            (POLICY_GROUP, CRITIC_GROUP)[: 1 if policy_group_only else 2] if has_groups(observation_space) else ()
        )
        parts = [observation_space[name] for name in self._groups] or [observation_space]  # type: ignore[index]
        self._readers = [_FlatReader(part) for part in parts]
        policy_actions = _policy_action_space(action_space)
        mask = mask_space(policy_actions) if has_mask else None
        boxes = [reader.space for reader in self._readers]
        obs_groups = ObsGroups(boxes[0], boxes[1] if len(boxes) == 2 else None, mask)
        is_row = len(boxes) == 2 or has_mask
        self.spec = EnvSpec(
            obs_groups.row_space() if is_row else boxes[0],
            policy_actions,
            max_episode_steps=max_episode_steps,
            obs_groups=obs_groups if is_row else None,
            images=image_parts(parts[0]),
        )
        self.convert_action = action_converter(action_space)
        """A function from the policy's action to an action of the environment's space; None if they are the same."""

    def read(self, obs: Any, mask: Array | None = None) -> Array:
        """Convert one observation to an array. The caller must check that it has the shape of `spec`.

        `mask` is the mask of the actions that are allowed, where observations have one."""
        if self._names:  # the mask is a part of the observation, which is left out here
            obs = obs[self._names[0]] if len(self._names) == 1 else {name: obs[name] for name in self._names}
        if self._groups:
            parts = [reader.read(obs[name]) for name, reader in zip(self._groups, self._readers, strict=True)]
        else:
            parts = [self._readers[0].read(obs)]
        if mask is not None:
            parts.append(mask)
        if len(parts) == 1:
            return parts[0]
        # One row, the policy's group first, and the mask last.
        return np.concatenate([part.ravel() for part in parts], dtype=self.spec.observation_space.dtype)


class _FlatReader:
    """Converts elements of a space to arrays."""

    def __init__(self, space: spaces.Space[Any]):
        self._original_space = space
        self._flattens = not isinstance(space, spaces.Box)
        self.space = _flat_observation_space(space)
        """The space of the arrays."""

    def read(self, obs: Any) -> Array:
        if self._flattens:
            obs = spaces.utils.flatten(self._original_space, obs)
        return np.asarray(obs, self.space.dtype)


def _flat_observation_space(space: spaces.Space[Any]) -> spaces.Box:
    """A Box of float32, or of uint8 for images, which take a quarter of the memory that way."""
    if not isinstance(space, spaces.Box):
        flat: Any = space
        with contextlib.suppress(NotImplementedError):
            flat = spaces.utils.flatten_space(space)
        if not isinstance(flat, spaces.Box):
            raise UserError(
                f"observation space {space} is not supported: use a Box, or a Dict or Tuple of Boxes and Discretes"
            )
        space = flat
    # Kinds of dtype: i is signed, u unsigned, b bool.
    if space.dtype == np.float64 or (space.dtype.kind in "iub" and space.dtype != np.uint8):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        space = spaces.Box(low, high, dtype=np.float32)
    return space


def _policy_action_space(space: spaces.Space[Any]) -> ActionSpace:
    """The action space that a policy sees: categories count from 0, and a Box is one row of float32."""
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        low, high = space.low.astype(np.float32).ravel(), space.high.astype(np.float32).ravel()
        return spaces.Box(low, high, dtype=np.float32)
    raise UserError(f"action space {space} is not supported: use Discrete, MultiDiscrete (one row) or Box (floats)")


def action_converter(space: spaces.Space[Any], batch_shape: tuple[int, ...] = ()) -> Callable[[Any], Any] | None:
    """From the policy's action, or a batch of them, to actions of a space; None if they are the same."""
    if isinstance(space, spaces.Discrete):
        kind, start = space.dtype.type, space.start
        return None if start == 0 and kind is np.int64 else lambda action: kind(action + start)
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start
        return lambda action: action + starts
    assert isinstance(space, spaces.Box)
    low, high, shape, dtype = space.low, space.high, (*batch_shape, *space.shape), space.dtype
    # A Gaussian policy may choose actions outside the bounds. Two ufuncs are faster than `np.clip` on small arrays.
    return lambda action: np.minimum(np.maximum(action.reshape(shape), low), high).astype(dtype)
