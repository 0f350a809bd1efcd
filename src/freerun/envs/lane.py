"""One environment as freerun sees it, and several of them stepped in turn."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import ActionSpace, Array, EnvFailure, EnvSpec, StepResult, UserError


class Lane(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Array observations, clipped actions, errors that name their seed."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        for name in ("observation_space", "action_space"):
            if getattr(env, name, None) is None:
                raise UserError(f"the environment has no {name}: set self.{name} in its __init__ (`freerun check-env`)")
        self.lane_spec = EnvSpec(_observation_space(env), _action_space(env))
        self.observation_space = self.lane_spec.observation_space
        self.action_space = self.lane_spec.action_space
        self._flatten = not isinstance(env.observation_space, spaces.Box)
        self._convert = _action_converter(env.action_space)
        self._shape, self._dtype = self.observation_space.shape, self.observation_space.dtype
        self._seed: int | None = None
        self._num_steps = 0
        self._resting = True
        self._obs: Array = np.zeros(self._shape, self._dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._seed, self._num_steps, self._resting = seed, 0, False
        try:
            obs, _ = self.env.reset(seed=seed)
        except Exception:
            raise self._failure("reset") from None
        return self._read(obs), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._resting:
            return self._obs, 0.0, False, False, {}
        try:
            obs, reward, terminated, truncated, _ = self.env.step(self._convert(action) if self._convert else action)
        except Exception:
            raise self._failure("step") from None
        self._num_steps += 1
        # Cheap environments take a few µs a step: what is as it should be is passed on as it is.
        if obs.__class__ is not np.ndarray or obs.dtype is not self._dtype or obs.shape != self._shape:
            obs = self._read(obs)
        if terminated or truncated:
            self._resting, self._obs = True, obs
        return obs, reward, terminated, truncated, {}  # type: ignore[return-value]

    def _read(self, obs: Any) -> Array:
        if self._flatten:
            obs = spaces.utils.flatten(self.env.observation_space, obs)
        array = np.asarray(obs, self._dtype)
        if array.shape != self._shape:
            raise UserError(
                f"the environment returned an observation of shape {array.shape} at step {self._num_steps}, but its "
                f"observation_space says {self._shape}: mend one of the two (`freerun check-env`)"
            )
        return array

    def _failure(self, doing: str) -> Exception:
        return EnvFailure(
            f"the environment raised in {doing}, after {self._num_steps} steps of the episode with seed {self._seed} "
            f"(env.reset(seed={self._seed}))\n{traceback.format_exc()}"
        )


def _observation_space(env: gymnasium.Env[Any, Any]) -> spaces.Box:
    space = env.observation_space
    if not isinstance(space, spaces.Box):
        flat: Any = space
        with contextlib.suppress(NotImplementedError):
            flat = spaces.utils.flatten_space(space)
        if not isinstance(flat, spaces.Box):
            raise UserError(
                f"observation space {space} is not supported: use a Box, or a Dict or Tuple of Boxes and Discretes"
            )
        space = flat
    if space.dtype == np.float64 or (space.dtype.kind in "iub" and space.dtype != np.uint8):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        space = spaces.Box(low, high, dtype=np.float32)
    return space


def _action_space(env: gymnasium.Env[Any, Any]) -> ActionSpace:
    """The policy's own view: categories count from 0, a Box is flat float32."""
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        low, high = space.low.astype(np.float32).ravel(), space.high.astype(np.float32).ravel()
        return spaces.Box(low, high, dtype=np.float32)
    raise UserError(f"action space {space} is not supported: use Discrete, MultiDiscrete (one row) or Box (floats)")


def _action_converter(space: spaces.Space[Any]) -> Callable[[Any], Any] | None:
    """From the policy's action to one that the space might have sampled; None where they are the same."""
    if isinstance(space, spaces.Discrete):
        kind, start = space.dtype.type, space.start
        return None if start == 0 and kind is np.int64 else lambda action: kind(action + start)
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start
        return lambda action: action + starts
    assert isinstance(space, spaces.Box)
    low, high, shape, dtype = space.low, space.high, space.shape, space.dtype
    return lambda action: np.minimum(np.maximum(action.reshape(shape), low), high).astype(dtype)


class Lanes:
    """Environments stepped one after another in this process."""

    def __init__(self, lanes: Sequence[Lane]):
        self.spec = lanes[0].lane_spec
        self.num_envs = len(lanes)
        self._lanes = lanes
        space = self.spec.observation_space
        self._obs = np.zeros((self.num_envs, *space.shape), space.dtype)
        self._reward = np.zeros(self.num_envs, np.float32)
        self._terminated = [False] * self.num_envs
        self._truncated = [False] * self.num_envs

    def reset(self, seeds: Sequence[int | None]) -> Array:
        for row, (lane, seed) in enumerate(zip(self._lanes, seeds, strict=True)):
            if seed is not None:
                self._obs[row], _ = lane.reset(seed=seed)
        return self._obs

    def step(self, action: Array) -> StepResult:
        obs, rewards, terminated, truncated = self._obs, self._reward, self._terminated, self._truncated
        for row, lane in enumerate(self._lanes):
            obs[row], rewards[row], terminated[row], truncated[row], _ = lane.step(action[row])
        return StepResult(obs, obs, rewards, terminated, truncated)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
