"""Any Gymnasium environment, by id, as `module:callable`, or as a callable."""

from __future__ import annotations

import contextlib
import difflib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

import freerun.envs
from freerun.core import EnvFailure, EnvSpec, Tracks, UserError, VectorEnv, import_callable
from freerun.envs.lane import Lane, Lanes
from freerun.envs.parallel import ParallelLanes

EnvName = str | Callable[..., "gymnasium.Env[Any, Any]"]
GYMNASIUM_ID = re.compile(r"^(?:[\w.]+:)?(?:[\w-]+/)?[\w.-]+-v\d+$")
EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "pygame": "render"}


@dataclass(frozen=True)
class GymnasiumFactory:
    """Builds lanes of one environment, here or in processes of their own."""

    env: EnvName
    env_args: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None

    def __post_init__(self) -> None:
        with contextlib.closing(self.make_lane()) as lane:
            object.__setattr__(self, "spec", lane.lane_spec)

    spec: EnvSpec = field(init=False)

    def make_lane(self, **extra: Any) -> Lane:
        env = make(self.env, {**self.env_args, **extra})
        if self.max_episode_steps is not None:
            env = gymnasium.wrappers.TimeLimit(env, self.max_episode_steps)
        return Lane(env)

    def make(self, num_envs: int) -> VectorEnv:
        vectorised = freerun.envs.VECTORISED.get(self.env) if isinstance(self.env, str) else None
        if vectorised is not None and self.max_episode_steps is None:
            many: VectorEnv = import_callable(vectorised, "environment")(num_envs, **self.env_args)
            return many
        return Lanes([self.make_lane() for _ in range(num_envs)])

    def make_parallel(self, num_envs: int, tracks: Tracks, step_timeout: float) -> ParallelLanes:
        return ParallelLanes(self, num_envs, tracks, step_timeout)


def make(env: EnvName, env_args: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Build one environment; say what to do when that fails for a reason the user can mend."""
    if isinstance(env, str) and not GYMNASIUM_ID.match(env) and ":" in env:
        env = import_callable(env, "environment")
    if callable(env):
        with _failures("building the environment"):
            built = env(**env_args)
        if not isinstance(built, gymnasium.Env):
            raise UserError(f"{env!r} must return a gymnasium.Env, but returned {type(built).__name__}")
        return built
    try:
        with _failures("building the environment"):
            built = gymnasium.make(env, disable_env_checker=True, **env_args)
        return _without_order_enforcing(built)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        described = f"{error} {getattr(gymnasium.registry.get(env), 'entry_point', '')}".lower()
        extra = next((extra for word, extra in EXTRAS.items() if word in described), None)
        advice = f"pip install 'freerun[{extra}]'" if extra else str(error)
        raise UserError(f"environment {env!r} needs something that is not installed: {advice}") from None
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound):
        raise UserError(_unknown(env)) from None
    except gymnasium.error.Error as error:
        raise UserError(f"environment {env!r} cannot be built: {error}") from None


def _without_order_enforcing(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """A lane resets before it steps, always: no need to check that at every step of a cheap environment."""
    if isinstance(env, gymnasium.wrappers.OrderEnforcing):
        return env.env
    if isinstance(env, gymnasium.Wrapper):
        env.env = _without_order_enforcing(env.env)
    return env


def _unknown(env: str) -> str:
    close = difflib.get_close_matches(env, list(gymnasium.registry), n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(close)}?" if close else "`freerun list` names some"
    return f"there is no environment {env!r}: {advice} (your own: module:callable)"


@contextlib.contextmanager
def _failures(doing: str) -> Iterator[None]:
    """An exception of the environment's own code becomes an EnvFailure with its traceback."""
    try:
        yield
    except (UserError, EnvFailure, gymnasium.error.Error, ModuleNotFoundError):
        raise
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "missing" in str(error):
            raise UserError(f"the --env-args do not fit the environment: {error}") from None
        raise EnvFailure(f"the environment raised in {doing}\n{traceback.format_exc()}") from None
    except Exception:
        raise EnvFailure(f"the environment raised in {doing}\n{traceback.format_exc()}") from None
