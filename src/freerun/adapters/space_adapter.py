"""Converts between an environment's own spaces and the plain arrays that a policy sees and chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from freerun.core import ActionSpace, Array, EnvSpec, ObsGroups, UserError

POLICY_GROUP, CRITIC_GROUP = "policy", "critic"
"""The names of the two groups of observations, as in Isaac Lab and RSL-RL."""


def has_groups(space: spaces.Space[Any]) -> bool:
    """True for a Dict of what the policy sees and what only the value function sees, and of nothing else."""
    return isinstance(space, spaces.Dict) and set(space) == {POLICY_GROUP, CRITIC_GROUP}


def policy_part(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """What the policy sees of an observation, in the environment's own words."""
    return space[POLICY_GROUP] if isinstance(space, spaces.Dict) and has_groups(space) else space


class SpaceAdapter:
    """Converts the observations and actions of one environment.

    Training and deployment share this code, so that a deployed policy sees what it has learned from."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        max_episode_steps: int | None = None,
        policy_group_only: bool = False,
    ):
        """With `policy_group_only`, observations of two groups are cut down to what the policy sees."""
        self._groups = (
            (POLICY_GROUP, CRITIC_GROUP)[: 1 if policy_group_only else 2] if has_groups(observation_space) else ()
        )
        parts = [observation_space[name] for name in self._groups] or [observation_space]  # type: ignore[index]
        self._readers = [_FlatReader(part) for part in parts]
        obs_groups = ObsGroups(*(reader.space for reader in self._readers)) if len(parts) == 2 else None
        self.spec = EnvSpec(
            self._readers[0].space if obs_groups is None else obs_groups.row_space(),
            _policy_action_space(action_space),
            max_episode_steps=max_episode_steps,
            obs_groups=obs_groups,
        )
        self.convert_action = _action_converter(action_space)
        """A function from the policy's action to an action of the environment's space; None if they are the same."""

    def read(self, obs: Any) -> Array:
        """Convert one observation to an array. The caller must check that it has the shape of `spec`."""
        if not self._groups:
            return self._readers[0].read(obs)
        parts = [reader.read(obs[name]) for name, reader in zip(self._groups, self._readers, strict=True)]
        # One row, the policy's group first.
        return parts[0] if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])


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


def _action_converter(space: spaces.Space[Any]) -> Callable[[Any], Any] | None:
    if isinstance(space, spaces.Discrete):
        kind, start = space.dtype.type, space.start
        return None if start == 0 and kind is np.int64 else lambda action: kind(action + start)
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start
        return lambda action: action + starts
    assert isinstance(space, spaces.Box)
    low, high, shape, dtype = space.low, space.high, space.shape, space.dtype
    # A Gaussian policy may choose actions outside the bounds. Two ufuncs are faster than `np.clip` on small arrays.
    return lambda action: np.minimum(np.maximum(action.reshape(shape), low), high).astype(dtype)
