"""Converts between an environment's own spaces and the plain arrays that a policy sees and chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from freerun.core import ActionSpace, Array, EnvSpec, UserError


class SpaceAdapter:
    """Converts the observations and actions of one environment.

    Training and deployment share this code, so that a deployed policy sees what it has learned from."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        max_episode_steps: int | None = None,
    ):
        self.spec = EnvSpec(
            _flat_observation_space(observation_space),
            _policy_action_space(action_space),
            max_episode_steps=max_episode_steps,
        )
        self.convert_action = _action_converter(action_space)
        """A function from the policy's action to an action of the environment's space; None if they are the same."""
        self._original_space = observation_space
        self._flattens = not isinstance(observation_space, spaces.Box)
        self._dtype = self.spec.observation_space.dtype

    def read(self, obs: Any) -> Array:
        """Convert one observation to an array. The caller must check that it has the shape of `spec`."""
        if self._flattens:
            obs = spaces.utils.flatten(self._original_space, obs)
        return np.asarray(obs, self._dtype)


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
