"""One Gymnasium environment as freerun sees it, and several of them stepped one after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from freerun.adapters.action_masks import EnvMasks, MaskSource
from freerun.adapters.env_wrappers import FrameStack
from freerun.adapters.space_adapter import SpaceAdapter
from freerun.core import Array, EnvFailure, EnvSpaces, EnvSpec, StepResult, UserError

ChangeEnv = Callable[["gymnasium.Env[Any, Any]", Mapping[str, Any]], "gymnasium.Env[Any, Any]"]
"""From an environment that is about to be reset, and the options of that reset, to the one to go on with."""


class EnvAdapter(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives observations as arrays, takes the policy's actions, and raises errors that name the episode's seed.

    After an episode has ended, `step` does nothing until `reset`: other environments that are stepped with this one may
    not have ended yet.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        policy_group_only: bool = False,
        change_env: ChangeEnv | None = None,
        mask_source: MaskSource | None = None,
    ):
        """With `policy_group_only`, what only the value function may see is left out of the observations. With a
        `mask_source`, they end with the mask that the environment has there."""
        super().__init__(env)
        self._change_env = change_env
        for name in ("observation_space", "action_space"):
            if getattr(env, name, None) is None:
                raise UserError(f"the environment has no {name}: set self.{name} in its __init__ (`freerun check-env`)")
        self.original_spaces = EnvSpaces(env.observation_space, env.action_space)
        self._adapter = SpaceAdapter(
            *self.original_spaces, _time_limit(env), policy_group_only, has_mask=mask_source is not None
        )
        self.env_spec = replace(self._adapter.spec, num_frames=_num_frames(env, self._adapter.spec))
        self.observation_space = self.env_spec.observation_space
        self.action_space = self.env_spec.action_space
        self._convert = self._adapter.convert_action
        self._shape, self._dtype = self.observation_space.shape, self.observation_space.dtype
        self._masks = None if mask_source is None else EnvMasks(mask_source, self.env_spec.action_space)
        # The shape of observations that need not be read. Where there are masks, each is read, to append its mask.
        self._ready_shape = self._shape if mask_source is None else None
        self._seed: int | None = None
        self._num_steps = 0
        self._has_ended = True
        self._final_obs: Array = np.zeros(self._shape, self._dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._seed, self._num_steps, self._has_ended = seed, 0, False
        if self._change_env is not None:
            self.env = self._change_env(self.env, options or {})
        try:
            result = self.env.reset(seed=seed)
        except Exception as error:
            raise self._failure("reset", error) from None
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(_wrong_result("reset", type(result).__name__))
        return self._read(*result, has_ended=False), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._has_ended:
            return self._final_obs, 0.0, False, False, {}
        try:
            result = self.env.step(self._convert(action) if self._convert else action)
        except Exception as error:
            raise self._failure("step", error) from None
        try:
            # Unpacking is the check: it costs nothing where the result is right.
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            found = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise UserError(_wrong_result("step", found)) from None
        self._num_steps += 1
        # A cheap environment takes a few µs per step, so an observation that already fits is passed on unread.
        if obs.__class__ is not np.ndarray or obs.dtype is not self._dtype or obs.shape != self._ready_shape:
            obs = self._read(obs, info, terminated or truncated)
        if terminated or truncated:
            self._has_ended, self._final_obs = True, obs
        return obs, reward, terminated, truncated, {}  # type: ignore[return-value]

    def _read(self, obs: Any, info: Any, has_ended: bool) -> Array:
        mask = None
        if self._masks is not None:
            place = f"after {self._num_steps} steps of the episode with seed {self._seed}"
            mask = self._masks.read(self.env, obs, info, place, has_ended)
        array = self._adapter.read(obs, mask)
        if array.shape != self._shape:
            raise UserError(
                f"the environment returned an observation of shape {array.shape} at step {self._num_steps}, but its "
                f"observation_space says {self._shape}: correct one of the two (`freerun check-env`)"
            )
        return array

    def _failure(self, doing: str, error: Exception) -> Exception:
        if isinstance(error, UserError):  # the environment itself says what to do, and a restart would not help
            return error
        if (found := _misread_by_gymnasium(doing, error)) is not None:
            return UserError(_wrong_result(doing, found))
        return EnvFailure(
            f"the environment raised in {doing}, after {self._num_steps} steps of the episode with seed {self._seed} "
            f"(env.reset(seed={self._seed}))\n{traceback.format_exc()}"
        )


def _num_frames(env: gymnasium.Env[Any, Any], spec: EnvSpec) -> int:
    """How many frames an observation stacks, if nothing has changed the stacks since."""
    while isinstance(env, gymnasium.wrappers.TimeLimit):
        env = env.env
    return env.num_frames if isinstance(env, FrameStack) and spec.obs_groups is None else 1


def _time_limit(env: gymnasium.Env[Any, Any]) -> int | None:
    """The shortest time limit among the wrappers around an environment, or None.

    The environment's `spec` is no help: it names a limit even if no wrapper enforces it, as in
    `gymnasium.make(...).unwrapped`."""
    limits = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            limits.append(env._max_episode_steps)
        env = env.env
    return min(limits, default=None)


RESULTS = {
    "reset": (2, "two values: obs, info"),
    "step": (5, "five values: obs, reward, terminated, truncated, info"),
}
"""What Gymnasium's interface asks of each method. In the old gym, `reset` returned one value and `step` four."""


def _wrong_result(doing: str, found: str) -> str:
    return (
        f"the environment's {doing} returned {found}, but must return {RESULTS[doing][1]}; "
        "`freerun check-env` says more about an environment with the interface of the old gym"
    )


def _misread_by_gymnasium(doing: str, error: Exception) -> str | None:
    """What the environment returned, if one of Gymnasium's own wrappers around it has failed to unpack that."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The innermost frame must be Gymnasium's: the environment's own code may fail to unpack something, too.
    is_theirs = frames[-1].f_globals.get("__name__", "").startswith("gymnasium.")
    if (
        not is_theirs
        or not isinstance(error, ValueError)
        or f"to unpack (expected {RESULTS[doing][0]}" not in str(error)
    ):
        return None
    return "another number of values"


class SerialEnvs:
    """A `VectorEnv` that steps its environments one after another in this process."""

    def __init__(self, envs: Sequence[EnvAdapter]):
        self.spec = envs[0].env_spec
        self.num_envs = len(envs)
        self._envs = envs
        space = self.spec.observation_space
        self._obs = np.zeros((self.num_envs, *space.shape), space.dtype)
        self._reward = np.zeros(self.num_envs, np.float32)
        self._terminated = [False] * self.num_envs
        self._truncated = [False] * self.num_envs

    def reset(self, seeds: Sequence[int | None]) -> Array:
        for row, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            if seed is not None:
                self._obs[row], _ = env.reset(seed=seed)
        return self._obs

    def step(self, action: Array) -> StepResult:
        obs, rewards, terminated, truncated = self._obs, self._reward, self._terminated, self._truncated
        for row, env in enumerate(self._envs):
            obs[row], rewards[row], terminated[row], truncated[row], _ = env.step(action[row])
        # No environment resets itself, so the final observation is simply the observation.
        return StepResult(obs, obs, rewards, terminated, truncated)

    def close(self) -> None:
        for env in self._envs:
            env.close()
