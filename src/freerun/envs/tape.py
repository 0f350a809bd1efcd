"""An episode as an environment gives it, recorded and replayed for `freerun check-env`.

Besides collectors/rollout.py this is the only caller of `env.step`: what a Lane mends on the way (types, flags, copies)
is what has to be seen here, so the bare environment is stepped; and nobody learns from these steps.
"""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
import random
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import EnvFailure, UserError

Env = gymnasium.Env[Any, Any]
REPLAY_STEPS = 200
REPLAY_SECONDS = 1.0
OUR_MODULES = {"freerun.envs.tape", "freerun.envs.check", "contextlib"}


@dataclass
class Tape:
    """One episode as the environment gave it."""

    seed: int
    obs: list[Any] = field(default_factory=list)
    """The first REPLAY_STEPS + 1: a long episode of images would not fit into memory."""
    last_obs: Any = None
    actions: list[Any] = field(default_factory=list)
    results: list[tuple[Any, bool, bool]] = field(default_factory=list)
    """Reward, terminated and truncated of each step."""
    last_info: Mapping[str, Any] = field(default_factory=dict)
    reset_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    reuses_buffer: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    """The first of each kind in check.FAULTS."""
    failure: str | None = None

    @property
    def num_steps(self) -> int:
        return len(self.results)

    @property
    def ended(self) -> bool:
        return bool(self.results) and any(self.results[-1][1:])

    @property
    def place(self) -> str:
        return f"after {self.num_steps} steps of the episode with seed {self.seed}"

    def note(self, kind: str, found: str) -> None:
        self.faults.setdefault(kind, f"{found}, {self.place}")

    def add_obs(self, space: spaces.Space[Any], obs: Any) -> None:
        for kind, found in _obs_faults(space, obs):
            self.note(kind, found)
        self.last_obs = copy.deepcopy(obs)
        if len(self.obs) <= REPLAY_STEPS:
            self.obs.append(self.last_obs)

    def add_result(self, reward: Any, terminated: Any, truncated: Any) -> None:
        self.results.append((copy.copy(reward), bool(np.any(terminated)), bool(np.any(truncated))))
        if not isinstance(reward, numbers.Real | np.bool_) and getattr(reward, "ndim", None) != 0:
            self.note("reward", f"the reward is no number, but {short(reward)}")
        elif not math.isfinite(float(reward)):
            self.note("reward", f"the reward is {float(reward)}")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if np.ndim(flag) or flag not in (False, True):
                self.note("flag", f"{name} is no bool, but {short(flag)}")


def short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:59] + "…"


def _obs_faults(space: spaces.Space[Any], obs: Any) -> Iterator[tuple[str, str]]:
    """Kinds in check.FAULTS and what was found, in the order in which freerun would stumble over them."""
    try:
        flat = space if isinstance(space, spaces.Box) else spaces.utils.flatten_space(space)
        if not isinstance(flat, spaces.Box):
            return  # not supported, as the topic `spaces` says
        array = np.asarray(obs if flat is space else spaces.utils.flatten(space, obs))
        finite = np.isfinite(array)
    except NotImplementedError:
        return  # not supported either
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        yield "unreadable", f"observation {short(obs)} does not fit {short(space)} ({error})"
        return
    if array.shape != flat.shape:
        yield "shape", f"the observation has shape {array.shape}, but observation_space says {flat.shape}"
    elif not finite.all():
        yield "finite", f"there is {array[~finite][0]} in the observation"
    elif isinstance(space, spaces.Box):
        # Compared in the type of the bounds: a float64 may lie beyond them by less than a rounding to float32.
        rounded = array.astype(space.dtype) if space.dtype.kind == "f" else array
        outside = (rounded < space.low) | (rounded > space.high)
        if outside.any():
            low, high = space.low[outside][0], space.high[outside][0]
            yield "outside", f"observation value {array[outside][0]:.6g} lies outside {low:.6g} to {high:.6g}"
    else:
        with warnings.catch_warnings(action="ignore"):  # Gymnasium advises against lists; freerun reads them
            if not space.contains(obs):
                yield "outside", f"observation {short(obs)} lies outside its space"


@contextlib.contextmanager
def raising(doing: str) -> Iterator[None]:
    """What the environment raises becomes an EnvFailure with the last two frames: where, and who called that."""
    try:
        yield
    except (EnvFailure, UserError):
        raise
    except Exception as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_globals["__name__"] in OUR_MODULES:
            frames = frames.tb_next
        lines = traceback.format_tb(frames, limit=-2) + traceback.format_exception_only(error)
        raise EnvFailure(f"{doing} raised\n{''.join(lines).rstrip()}") from None


def random_actions(env: Env, seed: int) -> Iterator[Any]:
    with raising("action_space.sample()"):
        space = copy.deepcopy(env.action_space)  # the environment may draw from its own
        space.seed(seed)
        while True:
            yield space.sample()


def play(env: Env, tape: Tape, actions: Iterable[Any], global_seed: int = 0) -> Iterator[None]:
    """Record an episode on the tape, a step per `next`; the global generators start from a seed of their own."""
    random.seed(global_seed)
    np.random.seed(global_seed)
    with raising(f"reset(seed={tape.seed})"):
        space, started = env.observation_space, time.perf_counter()
        result: Any = env.reset(seed=tape.seed)
        tape.reset_seconds = time.perf_counter() - started
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            tape.note("reset", f"reset() returns {type(result).__name__}, no pair of observation and info")
            result = (result, {})
        obs = result[0]
        tape.add_obs(space, obs)
    for action in actions:
        yield
        tape.actions.append(action)
        before, given = obs, copy.deepcopy(action)  # the environment may change what it is given
        with raising(f"step() {tape.place}"):
            started = time.perf_counter()
            result = env.step(given)
            tape.step_seconds.append(time.perf_counter() - started)
            if not isinstance(result, tuple) or len(result) not in (4, 5):
                tape.note("step", f"step() returns {short(result)}, not five values")
                return
            if len(result) == 4:
                tape.note("step", "step() returns four values, as in the old gym, not five")
                result = (*result[:3], False, result[3])
            obs, reward, terminated, truncated, info = result
            tape.add_result(reward, terminated, truncated)
            tape.add_obs(space, obs)
        tape.reuses_buffer |= isinstance(obs, np.ndarray) and obs is before
        tape.last_info = info if isinstance(info, dict) else {}
        if not isinstance(info, dict):
            tape.note("info", f"info is no dict, but {short(info)}")
        if tape.ended:
            return


def record(
    env: Env, seed: int, actions: Iterable[Any], max_steps: int, max_seconds: float, global_seed: int = 0
) -> Tape:
    """Play until the episode, the steps or the time are over, or the environment raises."""
    tape = Tape(seed)
    deadline = time.perf_counter() + max_seconds
    try:
        for _ in play(env, tape, actions, global_seed):
            if tape.num_steps >= max_steps or time.perf_counter() > deadline:
                break
    except EnvFailure as failure:
        tape.failure = str(failure)
    return tape


def replay(env: Env, tape: Tape, seed: int | None = None, global_seed: int = 0) -> Tape:
    """The same actions again, except one that raised."""
    seed, actions = tape.seed if seed is None else seed, tape.actions[: tape.num_steps]
    return record(env, seed, actions, REPLAY_STEPS, REPLAY_SECONDS, global_seed)


def replay_beside(other: Env, other_seed: int, env: Env, tape: Tape) -> Tape:
    """The same actions again, in turn with another environment."""
    again, actions = Tape(tape.seed), tape.actions[: min(tape.num_steps, REPLAY_STEPS)]
    deadline = time.perf_counter() + 2 * REPLAY_SECONDS
    for _ in zip(play(env, again, actions), play(other, Tape(other_seed), actions), strict=False):
        if time.perf_counter() > deadline:
            break
    return again


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    first, second = np.asarray(one), np.asarray(other)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f")


def difference(one: Tape, other: Tape) -> str | None:
    """Where two tapes first differ, as far as both go."""
    for step, (first, second) in enumerate(zip(one.obs, other.obs, strict=False)):
        if step and not same(one.results[step - 1], other.results[step - 1]):
            return f"reward, terminated or truncated of step {step} differ"
        if not same(first, second):
            return f"the observation after {step} steps differs"
    return other.failure
