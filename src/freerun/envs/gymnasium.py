"""Any Gymnasium environment, by id, as `module:callable`, or as a callable."""

from __future__ import annotations

import contextlib
import difflib
import multiprocessing
import pickle
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

import freerun.envs
from freerun.core import (
    Array,
    EnvFailure,
    EnvSpec,
    State,
    StepResult,
    Tracks,
    UserError,
    VectorEnv,
    WorkerDied,
    WorkerHung,
    import_callable,
)
from freerun.transport import processes
from freerun.transport.deaths import Coroner, is_stopped
from freerun.transport.stacks import StackFile

Result = TypeVar("Result")
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


class Lane(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment as freerun sees it: array observations, clipped actions, errors that name their seed."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
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


def _action_space(env: gymnasium.Env[Any, Any]) -> spaces.Discrete | spaces.MultiDiscrete | spaces.Box:
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


class ParallelLanes:
    """Environments in a process each, behind Gymnasium's AsyncVectorEnv with shared memory.

    Autoreset is disabled and `reset_mask` used, so that every episode starts from its own seed and no row is garbage.
    After a failure it must not be used again: a late answer would be taken for that to the next question.
    """

    def __init__(self, factory: GymnasiumFactory, num_envs: int, tracks: Tracks, step_timeout: float):
        self.spec = factory.spec
        self.num_envs = num_envs
        self._timeout = step_timeout
        self._coroner = Coroner()
        self._stacks = StackFile()
        processes.context()
        started = list(multiprocessing.active_children())
        with processes.without_main():
            try:
                self._vector = AsyncVectorEnv(
                    [_LaneInProcess(factory, tracks, self._stacks, index) for index in range(num_envs)],
                    context="forkserver",
                    copy=False,
                    autoreset_mode=AutoresetMode.DISABLED,
                )
            except (EOFError, BrokenPipeError, ConnectionResetError):
                processes.stop([child for child in multiprocessing.active_children() if child not in started], 0.0)
                raise WorkerDied("a process died before its environment was built") from None

    def reset(self, seeds: Sequence[int | None]) -> Array:
        mask = np.array([seed is not None for seed in seeds])
        with self._supervised():
            self._vector.reset_async(seed=list(seeds), options={"reset_mask": mask})
            obs, _ = self._vector.reset_wait(self._timeout)
        return obs  # type: ignore[no-any-return]

    def step(self, action: Array) -> StepResult:
        with self._supervised():
            self._vector.step_async(action)
            obs, reward, terminated, truncated, _ = self._vector.step_wait(self._timeout)
        return StepResult(obs, obs, reward, terminated, truncated)

    @contextlib.contextmanager
    def _supervised(self) -> Iterator[None]:
        with _without_log():
            try:
                yield
            except multiprocessing.TimeoutError:
                raise self._hung() from None
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise self._died() from None

    def _hung(self) -> WorkerHung:
        late = [index for index, pipe in enumerate(self._vector.parent_pipes) if pipe and not pipe.poll()]
        texts, stopped = [], []
        for index in late:
            pid = self._vector.processes[index].pid or 0
            stopped.append(is_stopped(pid))
            how = "stopped by a signal" if stopped[-1] else f"its stack:\n{self._stacks.capture(pid)}"
            texts.append(f"worker {index}: {how}")
        failure = WorkerHung(f"no answer within {self._timeout:g} s (--step-timeout) from " + "\n".join(texts))
        failure.worker, failure.from_outside = late[0] if late else 0, bool(stopped) and all(stopped)
        return failure

    def _died(self) -> EnvFailure:
        processes.wait_for_any(self._vector.processes)
        for index, process in enumerate(self._vector.processes):
            if process.exitcode is not None:
                failure = self._coroner.report(index, process.pid, process.exitcode)
                failure.worker = index
                return failure
        return WorkerDied("a process closed its pipe")

    def close(self) -> None:
        processes.stop(self._vector.processes, 0.0)
        # Ctrl-C may have come in the middle of a message: Gymnasium would wait for the answer and read its other half.
        self._vector._state = AsyncState.DEFAULT
        self._vector.close(terminate=True)
        self._stacks.close()


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """An error in a process is raised here with its traceback; Gymnasium would print it a second time."""
    level = gymnasium.logger.min_level
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    try:
        yield
    finally:
        gymnasium.logger.min_level = level


@dataclass
class _LaneInProcess:
    factory: GymnasiumFactory
    tracks: Tracks
    stacks: StackFile
    index: int

    def __getstate__(self) -> tuple[Any, ...]:
        # Gymnasium pickles it with cloudpickle, which knows nothing of shared memory.
        return self.factory, bytes(ForkingPickler.dumps((self.tracks, self.stacks))), self.index

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.factory, (self.tracks, self.stacks), self.index = state[0], pickle.loads(state[1]), state[2]

    def __call__(self) -> gymnasium.Env[Any, Any]:
        # AsyncVectorEnv also builds one in the learner's process, to look at its spaces.
        if not processes.is_worker():
            return self.factory.make_lane()
        processes.enter_worker()
        self.stacks.write_on_signal()
        try:
            return _Tracked(self.factory.make_lane(), self.tracks, self.index)
        except (UserError, EnvFailure) as failure:
            return _NotBuilt(self.factory.spec, failure)


class _NotBuilt(gymnasium.Env[Any, Any]):
    """In the place of an environment that could not be built: AsyncVectorEnv passes on only what `reset` raises."""

    def __init__(self, spec: EnvSpec, failure: Exception):
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self._failure = failure

    def reset(self, **arguments: Any) -> Any:
        raise self._failure


class _Tracked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes when it is busy; in between it waits for the slowest of those that step with it, and for the learner."""

    def __init__(self, lane: Lane, tracks: Tracks, index: int):
        super().__init__(lane)
        self._tracks, self._index = tracks, index

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self._noted(lambda: self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._noted(lambda: self.env.step(action))

    def _noted(self, work: Callable[[], Result]) -> Result:
        self._tracks.enter(self._index, State.BUSY)
        try:
            return work()
        finally:
            self._tracks.enter(self._index, State.WAITING_FOR_OTHERS)
