"""Vector environments of others (`gymnasium.vector`, EnvPool): one call steps all environments of a worker."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from freerun.adapters.action_masks import MASK_KEY, Mask, MaskReader, MaskSource
from freerun.adapters.space_adapter import SpaceAdapter, action_converter
from freerun.core import Array, BatchReset, EnvFailure, EnvSpec, StepResult, UserError

AnyVectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]
VECTOR_PREFIX, ENVPOOL_PREFIX = "vector:", "envpool:"
"""ENV as vector:ID is Gymnasium's own vector version of an environment, and as envpool:ID that of EnvPool."""
FINAL_OBS, FINAL_INFO = "final_obs", "final_info"
BATCH_RESETS = {
    AutoresetMode.DISABLED: BatchReset.ON_CALL,
    AutoresetMode.SAME_STEP: BatchReset.SAME_STEP,
    AutoresetMode.NEXT_STEP: BatchReset.NEXT_STEP,
}


# ---------------------------------------------------------------------------------------------- building


def vector_builder(env: str | Callable[..., Any]) -> Callable[..., AnyVectorEnv] | None:
    """What builds a vector environment from num_envs and --env-args; None if ENV is not named as one."""
    if not isinstance(env, str):
        return env if isinstance(env, type) and issubclass(env, gymnasium.vector.VectorEnv) else None
    if env.startswith(VECTOR_PREFIX):
        return functools.partial(_make_own_vector, env.removeprefix(VECTOR_PREFIX))
    if env.startswith(ENVPOOL_PREFIX):
        return functools.partial(EnvPoolEnvs, env.removeprefix(ENVPOOL_PREFIX))
    return None


def _make_own_vector(name: str, num_envs: int, **env_args: Any) -> AnyVectorEnv:
    """The vector version that an environment of Gymnasium's registry has of its own."""
    known = gymnasium.registry.get(name)
    if known is not None and known.vector_entry_point is None:
        raise UserError(
            f"{name} has no vector version of its own: leave {VECTOR_PREFIX} out, and each worker steps its "
            "environments one after another"
        )
    return gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **env_args)


def num_envs_parameter(build: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter of a function or class that says how many environments to build; None if it has none."""
    try:
        return inspect.signature(build).parameters.get("num_envs")
    except (TypeError, ValueError):  # a builtin, which does not say
        return None


class EnvPoolEnvs(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """EnvPool's environments. EnvPool takes a seed only when it is built, so a reset with a seed builds it anew."""

    def __init__(self, task: str, num_envs: int, **config: Any):
        try:
            import envpool
        except ImportError:
            raise UserError(f"{ENVPOOL_PREFIX}{task} needs EnvPool: pip install 'freerun[envpool]'") from None
        if task not in envpool.list_all_envs():
            raise UserError(f"EnvPool has no environment {task!r}: its environments are compiled in")
        # A worker has one core. More threads pay where there are fewer workers than cores.
        config = {"num_threads": 1, **config}
        self._make = functools.partial(envpool.make, task, env_type="gymnasium", num_envs=num_envs, **config)
        self._pool = self._build()
        single_obs, single_action = self._pool.observation_space, self._pool.action_space
        self.num_envs, self.metadata = num_envs, self._pool.metadata
        self.single_observation_space, self.single_action_space = single_obs, single_action
        self.observation_space, self.action_space = (
            batch_space(single_obs, num_envs),
            batch_space(single_action, num_envs),
        )

    def _build(self, **seed: int) -> Any:
        with warnings.catch_warnings():  # the bounds of its spaces are float64, and Gymnasium warns that it lowers them
            warnings.simplefilter("ignore", UserWarning)
            pool = self._make(**seed)
            pool.reset()  # which makes its spaces
        return pool

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._build(seed=seed % (1 << 31))  # it takes signed 32-bit seeds
        return self._pool.reset()  # type: ignore[no-any-return]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._pool.step(actions)  # type: ignore[no-any-return]

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()


def batch_reset_of(env: AnyVectorEnv) -> BatchReset:
    """Who starts the next episodes of a vector environment, as its metadata say."""
    mode = env.metadata.get("autoreset_mode")
    with contextlib.suppress(ValueError):
        mode = AutoresetMode(mode)  # some environments have its text
    if mode not in BATCH_RESETS:
        raise UserError(
            f'the vector environment {type(env.unwrapped).__name__} does not say when it resets itself: set metadata["'
            'autoreset_mode"] to one of gymnasium.vector.AutoresetMode'
        )
    return BATCH_RESETS[mode]


# ---------------------------------------------------------------------------------------------- one environment


class OneOfVector(gymnasium.Env[Any, Any]):
    """A vector environment with a single environment, as an environment: `reset` can seed every episode of it."""

    def __init__(self, env: AnyVectorEnv):
        self.vector = env
        self.batch_reset = batch_reset_of(env)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.metadata, self.render_mode = env.metadata, env.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.vector.reset(seed=seed)
        return self._first(obs), self._first_info(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = np.expand_dims(np.asarray(action), 0)
        obs, reward, terminated, truncated, infos = self.vector.step(actions)
        has_ended = bool(terminated[0] or truncated[0])
        is_next = has_ended and self.batch_reset is BatchReset.SAME_STEP
        # Observation and info are then those of the next episode, which nobody has begun here.
        shown = final_obs_of(infos, 0) if is_next else self._first(obs)
        info = self._first_info(infos.get(FINAL_INFO, {}) if is_next else infos)
        return shown, float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def _first(self, obs: Any) -> Any:
        return next(iter(iterate(self.vector.observation_space, obs)))

    def _first_info(self, infos: Mapping[str, Any]) -> dict[str, Any]:
        """What freerun reads of an info."""
        return {MASK_KEY: _part(infos[MASK_KEY], 0)} if MASK_KEY in infos else {}

    def render(self) -> Any:
        frames: Any = self.vector.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self.vector.close()


def final_obs_of(infos: Mapping[str, Any], index: int) -> Any:
    """The last observation of an episode, where the environment has begun the next one in the same step."""
    if FINAL_OBS not in infos:
        raise UserError(
            "the vector environment resets itself in the step that ends an episode, but its info has no "
            f'"{FINAL_OBS}": put the last observations there, as gymnasium.vector.SyncVectorEnv does'
        )
    return _part(infos[FINAL_OBS], index)


def _part(batch: Any, index: int) -> Any:
    """What belongs to one environment. Gymnasium's infos hold arrays, and dicts of arrays."""
    return {name: _part(part, index) for name, part in batch.items()} if isinstance(batch, Mapping) else batch[index]


# ---------------------------------------------------------------------------------------------- many environments


class NativeVectorEnvs:
    """A `core.VectorEnv` on top of a vector environment of Gymnasium's interface."""

    def __init__(self, env: AnyVectorEnv, spec: EnvSpec, policy_group_only: bool, mask_source: MaskSource | None):
        self.spec, self.num_envs = spec, env.num_envs
        self._env = env
        single = env.single_observation_space
        self._adapter = SpaceAdapter(single, env.single_action_space, None, policy_group_only, mask_source is not None)
        self._convert = action_converter(env.single_action_space, (env.num_envs,))
        self._is_plain = isinstance(single, spaces.Box)
        self._mask_source = mask_source
        self._mask_reader = None if mask_source is None else MaskReader(spec.action_space)
        self._shape = (env.num_envs, *spec.observation_space.shape)
        self._obs: Array | None = None
        self._has_ended = np.zeros(env.num_envs, np.bool_)
        self._is_playing = np.zeros(env.num_envs, np.bool_)
        self._num_calls = 0

    def reset(self, seeds: Sequence[int | None]) -> Array:
        on_call = self.spec.batch_reset is BatchReset.ON_CALL
        wanted = np.array([seed is not None for seed in seeds])
        if self._obs is None:
            # Some take a list of seeds, and all a number, from which they seed all of their environments.
            self._reset(list(seeds) if on_call else seeds[0])
        elif on_call:
            self._reset(list(seeds), wanted)
        # The others have begun the next episodes themselves, or will in the next step.
        self._is_playing |= wanted
        assert self._obs is not None
        return self._obs

    def _reset(self, seed: Any, chosen: Mask | None = None) -> None:
        """Reset all environments, or those that are chosen."""
        with self._failures("reset"):
            options = None if chosen is None else {"reset_mask": chosen}
            obs, infos = self._env.reset(seed=seed, options=options)
        if chosen is None or self._obs is None:
            chosen = np.ones(self.num_envs, np.bool_)
            self._obs = np.zeros(self._shape, self.spec.observation_space.dtype)
        # A copy, because the rows of a step that was returned must not change.
        self._obs = np.where(_column(chosen, self._obs), self._read(obs, infos, ~chosen), self._obs)
        self._has_ended &= ~chosen

    def step(self, action: Array) -> StepResult:
        on_call = self.spec.batch_reset is BatchReset.ON_CALL
        if on_call and (unwanted := self._has_ended & ~self._is_playing).any():
            # Nobody wants their next episodes now, but Gymnasium's vector environments refuse to step them.
            self._reset([None] * self.num_envs, unwanted)
        action = self._convert(action) if self._convert else action
        with self._failures("step"):
            obs, reward, terminated, truncated, infos = self._env.step(action)
        self._num_calls += 1
        ended = self._has_ended = np.asarray(terminated) | np.asarray(truncated)
        if self.spec.batch_reset is BatchReset.SAME_STEP:
            self._obs = final_obs = self._read(obs, infos, np.zeros_like(ended))
            if ended.any():
                final_obs = self._obs.copy()
                for index in np.flatnonzero(ended).tolist():
                    last = final_obs_of(infos, index)
                    final_obs[index] = self._adapter.read(last, self._read_last_mask(last, infos, index))
            return StepResult(self._obs, final_obs, reward, terminated, truncated)
        self._obs = self._read(obs, infos, (ended | ~self._is_playing) if on_call else ended)
        if on_call:
            playing, self._is_playing = self._is_playing, self._is_playing & ~ended
            return StepResult(self._obs, self._obs, reward, terminated & playing, truncated & playing)
        return StepResult(self._obs, self._obs, reward, terminated, truncated)

    def _read(self, obs: Any, infos: Mapping[str, Any], rests: Mask) -> Array:
        """The observations as rows. Where an environment rests, no action follows, so that its mask may be missing."""
        masks = None if self._mask_reader is None else self._read_masks(self._mask_reader, obs, infos, rests)
        space = self.spec.observation_space
        if self._is_plain:
            rows = np.asarray(obs, space.dtype)
            if masks is not None:
                rows = np.concatenate([rows.reshape(self.num_envs, -1), masks], axis=1, dtype=space.dtype)
        else:
            parts = iterate(self._env.observation_space, obs)
            each = [None] * self.num_envs if masks is None else masks
            rows = np.stack([self._adapter.read(part, mask) for part, mask in zip(parts, each, strict=True)])
        if rows.shape != self._shape:
            raise UserError(
                f"the vector environment returned observations of shape {rows.shape}, but {self.num_envs} of its "
                f"single_observation_space have shape {self._shape}: correct one of the two"
            )
        return rows

    def _read_masks(self, reader: MaskReader, obs: Any, infos: Mapping[str, Any], rests: Mask) -> Mask:
        found = (obs if self._mask_source is MaskSource.OBSERVATION else infos).get(MASK_KEY)
        masks = np.zeros((self.num_envs, reader.size), np.bool_)
        if found is None:
            if rests.all():
                return masks
            raise UserError(f'the action masks are missing: the vector environment\'s info has no "{MASK_KEY}"')
        if getattr(found, "shape", None) == masks.shape:
            masks[...] = found != 0
        else:  # a tuple of several masks for each environment
            for index, is_resting in enumerate(rests.tolist()):
                mask = _part(found, index)
                try:
                    masks[index] = reader.read_last({MASK_KEY: mask}) if is_resting else reader.read(mask)
                except (TypeError, ValueError) as error:
                    raise UserError(f"the action mask of environment {index} cannot be read: {error}") from None
        if not (reader.allows_something(masks) | rests).all():
            raise UserError(
                f"an action mask of the vector environment forbids every action after {self._num_calls} steps: allow "
                "at least one, or end the episode there"
            )
        return masks

    def _read_last_mask(self, last: Any, infos: Mapping[str, Any], index: int) -> Mask | None:
        """The mask that goes with the last observation of an episode; None if observations have no masks."""
        if self._mask_reader is None:
            return None
        if self._mask_source is MaskSource.OBSERVATION:
            return self._mask_reader.read_last(last)
        masks = infos.get(FINAL_INFO, {}).get(MASK_KEY)
        return self._mask_reader.read_last({} if masks is None else {MASK_KEY: _part(masks, index)})

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (UserError, EnvFailure):
            raise
        except Exception:
            raise EnvFailure(
                f"the vector environment raised in {doing}, after {self._num_calls} steps\n{traceback.format_exc()}"
            ) from None

    def close(self) -> None:
        self._env.close()


def _column(chosen: Mask, rows: Array) -> Array:
    """A choice of rows, in a shape that goes with them."""
    return chosen.reshape(-1, *[1] * (rows.ndim - 1))
