"""Builds any environment of Gymnasium's interface: from an id, from `module:callable`, or from a callable."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

import freerun.adapters.catalog
from freerun.adapters import mujoco_warnings
from freerun.adapters.action_masks import MaskSource, find_mask_source, has_choices
from freerun.adapters.env_adapter import EnvAdapter, SerialEnvs
from freerun.adapters.env_packages import not_installed, unregistered
from freerun.adapters.env_wrappers import build_wrapped
from freerun.adapters.images import image_shape
from freerun.adapters.parallel_envs import ParallelEnvs
from freerun.adapters.space_adapter import has_groups
from freerun.adapters.vector_envs import AnyVectorEnv, NativeVectorEnvs, OneOfVector, num_envs_parameter, vector_builder
from freerun.core import (
    ENV_ARGS_OPTION,
    Array,
    BatchReset,
    ChangeableEnv,
    EnvArgsBox,
    EnvFailure,
    EnvSpaces,
    EnvSpec,
    Tracks,
    UserError,
    VectorEnv,
    callable_name,
    import_callable,
)

EnvName = str | Callable[..., "gymnasium.Env[Any, Any]"]
# [module:][namespace/]name-v0
GYMNASIUM_ID = re.compile(r"^(?:[\w.]+:)?(?:[\w-]+/)?[\w.-]+-v\d+$")
NO_PICTURES = "this environment draws no pictures: leave --render out"
EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "pygame": "render", "opencv": "atari"}
"""A word in the error about a missing dependency, and the extra of freerun that installs it."""


@dataclass(frozen=True)
class GymnasiumFactory:
    """An `EnvFactory`: builds any number of copies of one environment, in this process or in one process each.

    It builds one copy at once to learn its spaces, so that an environment that cannot be built is reported early.
    """

    env: EnvName
    env_args: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    policy_group_only: bool = False
    """Leave out what only the value function may see, for an algorithm that has no use for it."""
    ignore_masks: bool = False
    """Leave out the masks of actions, for an algorithm that has no use for them."""
    wrap: str | None = None
    """The name of a wrapper around each environment (`env_wrappers.WRAPPERS`)."""

    def __post_init__(self) -> None:
        with contextlib.closing(self._build({}, {})) as env:
            found = find_mask_source(env)
            is_usable = has_choices(getattr(env, "action_space", None)) and not self.ignore_masks
            # The dataclass is frozen; these fields are set once, here.
            object.__setattr__(self, "mask_source", found if is_usable else None)
            object.__setattr__(self, "hides_masks", found is not None and not is_usable)
            adapter = EnvAdapter(env, self.policy_group_only, mask_source=self.mask_source)
            one = env.unwrapped
            batch_reset = one.batch_reset if isinstance(one, OneOfVector) else BatchReset.ON_CALL
            object.__setattr__(self, "spec", replace(adapter.env_spec, batch_reset=batch_reset))
            object.__setattr__(self, "is_vector", isinstance(one, OneOfVector))
            object.__setattr__(self, "spaces", adapter.original_spaces)
            object.__setattr__(self, "image_shape", image_shape(env.observation_space))
            object.__setattr__(self, "logged_warnings", frozenset(mujoco_warnings.LOGGED))

    spec: EnvSpec = field(init=False)
    spaces: EnvSpaces = field(init=False)
    """The environment's original spaces, before `SpaceAdapter` has simplified them for policies."""
    image_shape: tuple[int, ...] | None = field(init=False)
    """The shape of the image that an observation is or contains, before it is flattened; None if there is none."""
    mask_source: MaskSource | None = field(init=False)
    """Where the environment says which actions are allowed; None if it does not, or if nobody asks."""
    hides_masks: bool = field(init=False)
    """True if the environment has masks that are left out."""

    is_vector: bool = field(init=False)
    """True if one call of the environment's own steps several of them."""

    logged_warnings: frozenset[str] = field(init=False, default=frozenset())
    """What the simulator has said about the first environment, and workers need not say again."""

    box: EnvArgsBox | None = field(init=False, default=None)
    """Where arguments arrive that change while a run goes on; None if none ever do."""

    @property
    def hides_critic_group(self) -> bool:
        """True if the environment has observations for the value function alone that are left out."""
        return self.policy_group_only and has_groups(self.spaces.observation)

    def with_parts_of(self, spec: EnvSpec) -> GymnasiumFactory:
        """Return a factory of the same environments, whose rows are said to have the groups and images of `spec`."""
        described = copy.copy(self)
        object.__setattr__(described, "spec", replace(self.spec, obs_groups=spec.obs_groups, images=spec.images))
        return described

    def with_changes_from(self, box: EnvArgsBox) -> GymnasiumFactory:
        """Return a factory of the same environments, which take the arguments in the box when they reset."""
        changing = copy.copy(self)  # and not `replace`, which would build an environment again
        object.__setattr__(changing, "box", box)
        return changing

    def make_one(self, **extra: Any) -> EnvAdapter:
        """One environment; `extra` arguments are added to those of its constructor."""
        build = functools.partial(self._build, extra)
        change_env = None if self.box is None else ArgsAtReset(self.box, build)
        return EnvAdapter(build({}), self.policy_group_only, change_env, self.mask_source)

    def _build(self, extra: Mapping[str, Any], changed: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        args = {**self.env_args, **changed, **extra}
        mujoco_warnings.log_each_once(self.env, self.logged_warnings)
        env = make_wrapped(self.env, args, self.wrap)
        if self.max_episode_steps is None:
            return env
        if isinstance(env, OneOfVector):
            raise UserError(
                "--max-episode-steps cannot cut the episodes of a vector environment: leave it out, or give "
                f"--env-args max_episode_steps {self.max_episode_steps} if the environment takes that"
            )
        return gymnasium.wrappers.TimeLimit(env, self.max_episode_steps)

    def make(self, num_envs: int) -> VectorEnv:
        if self.is_vector and num_envs > 1:
            vector = make_vector(self.env, num_envs, self.env_args)
            native = NativeVectorEnvs(vector, self.spec, self.policy_group_only, self.mask_source)
            return native if self.box is None else FixedArgsEnvs(native, self.box, callable_name(self.env))
        vectorised = freerun.adapters.catalog.VECTORISED.get(self.env) if isinstance(self.env, str) else None
        if vectorised is not None and self.max_episode_steps is None and self.wrap is None:
            env: VectorEnv = import_callable(vectorised, "environment")(num_envs, **self.env_args)
            if env.spec.has_mask == self.spec.has_mask:  # otherwise it has masks, which are left out here
                return env if self.box is None else FixedArgsEnvs(env, self.box, str(self.env))
        return SerialEnvs([self.make_one() for _ in range(num_envs)])

    def make_parallel(self, num_envs: int, tracks: Tracks, step_timeout: float) -> ParallelEnvs:
        return ParallelEnvs(self, num_envs, tracks, step_timeout, self.box)


class ArgsAtReset:
    """Gives an environment the arguments that have changed since its last reset, or builds another one with them."""

    def __init__(self, box: EnvArgsBox, build: Callable[[Mapping[str, Any]], gymnasium.Env[Any, Any]]):
        self._box = box
        self._build = build
        self._num_taken = 0

    def __call__(self, env: gymnasium.Env[Any, Any], options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        if ENV_ARGS_OPTION in options:
            self._box.take(*options[ENV_ARGS_OPTION])
        number, changed = self._box.newest
        if number == self._num_taken:
            return env
        self._num_taken = number
        if isinstance(env.unwrapped, ChangeableEnv):
            with _failures("set_env_args"):
                env.unwrapped.set_env_args(**changed)
            return env
        env.close()
        other = self._build(changed)
        if (other.observation_space, other.action_space) != (env.observation_space, env.action_space):
            raise UserError(
                f"set_env_args({changed}) changes the spaces of the environment, which a policy cannot follow"
            )
        return other


class FixedArgsEnvs:
    """Environments that one call steps together. Their arguments cannot change, and this says so."""

    def __init__(self, env: VectorEnv, box: EnvArgsBox, name: str):
        self.spec, self.num_envs, self.step, self.close = env.spec, env.num_envs, env.step, env.close
        self._env, self._box, self._name = env, box, name

    def reset(self, seeds: Sequence[int | None]) -> Array:
        if self._box.newest[0]:
            raise UserError(f"set_env_args reaches {self._name} only where a worker has one: give --envs-per-worker 1")
        return self._env.reset(seeds)


def make_vector(env: EnvName, num_envs: int, env_args: Mapping[str, Any]) -> AnyVectorEnv:
    """Build a vector environment with this many environments."""
    if isinstance(env, str) and vector_builder(env) is None:
        env = import_callable(env, "environment")
    build = vector_builder(env) or env
    assert callable(build)
    if "num_envs" in env_args:
        raise UserError("freerun itself says how many environments a vector environment has: give --envs-per-worker")
    with _failures("building the environment"):
        built: Any = build(num_envs=num_envs, **env_args)
    if not isinstance(built, gymnasium.vector.VectorEnv) or built.num_envs != num_envs:
        raise UserError(
            f"{callable_name(env)} takes num_envs, so it must return a gymnasium.vector.VectorEnv of that many "
            f"environments ({num_envs}), but returned {type(built).__name__}"
        )
    return built


def make_wrapped(env: EnvName, env_args: Mapping[str, Any], wrap: str | None) -> gymnasium.Env[Any, Any]:
    """Build one environment, inside the wrapper of this name if there is one."""
    return build_wrapped(wrap, lambda more: make(env, {**more, **env_args}))


def make(env: EnvName, env_args: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Build one environment. If that fails for a reason the user can remove, the error says how."""
    if isinstance(env, str) and vector_builder(env) is None and not GYMNASIUM_ID.match(env) and ":" in env:
        env = import_callable(env, "environment")
    if vector_builder(env) is not None:
        with _known_mistakes(callable_name(env)):
            return OneOfVector(make_vector(env, 1, env_args))
    if callable(env):
        num_envs = num_envs_parameter(env)
        if num_envs is not None and num_envs.default is num_envs.empty and "num_envs" not in env_args:
            return OneOfVector(make_vector(env, 1, env_args))
        with _failures("building the environment"):
            built: Any = env(**env_args)
        if isinstance(built, gymnasium.vector.VectorEnv):
            if num_envs is None:
                raise UserError(
                    f"{callable_name(env)} returned a vector environment ({type(built).__name__}): it must take an "
                    "argument num_envs, because each worker builds one with --envs-per-worker environments"
                )
            built.close()
            return OneOfVector(make_vector(env, 1, env_args))
        if not isinstance(built, gymnasium.Env):
            raise UserError(f"{callable_name(env)} must return a gymnasium.Env, but returned {type(built).__name__}")
        return built
    assert isinstance(env, str)
    with _known_mistakes(env):
        with _failures("building the environment"):
            # The checker would be one more wrapper around every step; `freerun check-env` does its work.
            built = gymnasium.make(env, disable_env_checker=True, **env_args)
        return _without_order_enforcing(built)


@contextlib.contextmanager
def _known_mistakes(env: str) -> Iterator[None]:
    """Turn what Gymnasium says about an id that it cannot build into a sentence that says what to do."""
    try:
        yield
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        # Some errors do not name the missing package, but the entry point does (gymnasium.envs.mujoco…).
        described = f"{error} {getattr(gymnasium.registry.get(env), 'entry_point', '')}".lower()
        extra = next((extra for word, extra in EXTRAS.items() if word in described), None)
        advice = f"pip install 'freerun[{extra}]'" if extra else not_installed(env, error) or str(error)
        raise UserError(f"environment {env!r} needs something that is not installed: {advice}") from None
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound):
        raise UserError(unregistered(env)) from None
    except gymnasium.error.Error as error:
        raise UserError(f"environment {env!r} cannot be built: {error}") from None


def _without_order_enforcing(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Remove Gymnasium's check that `reset` comes before `step`: `EnvAdapter` ensures it, and the check costs time."""
    if isinstance(env, gymnasium.wrappers.OrderEnforcing):
        return env.env
    if isinstance(env, gymnasium.Wrapper):
        env.env = _without_order_enforcing(env.env)
    return env


@contextlib.contextmanager
def _failures(doing: str) -> Iterator[None]:
    """Turn an exception of the environment's own code into an EnvFailure that holds its traceback."""
    try:
        yield
    except (UserError, EnvFailure, gymnasium.error.Error, ModuleNotFoundError):
        raise
    except TypeError as error:
        if "unexpected keyword argument 'render_mode'" in str(error):
            raise UserError(f"{NO_PICTURES} (its constructor takes no render_mode)") from None
        if "unexpected keyword argument" in str(error) or "missing" in str(error):
            raise UserError(f"the --env-args do not fit the environment: {error}") from None
        raise EnvFailure(f"the environment raised in {doing}\n{traceback.format_exc()}") from None
    except Exception:
        raise EnvFailure(f"the environment raised in {doing}\n{traceback.format_exc()}") from None
