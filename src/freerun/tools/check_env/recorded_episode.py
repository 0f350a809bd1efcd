"""Records and replays episodes of an environment for `freerun check-env`.

It steps the bare environment and not its adapter, because an adapter mends what must be seen here: types, flags and
reused arrays. No learner learns from these steps.
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

from freerun.adapters.action_masks import RandomAllowedActions
from freerun.core import EnvFailure, UserError

Env = gymnasium.Env[Any, Any]
REPLAY_STEPS = 200
REPLAY_SECONDS = 1.0
OUR_MODULES = {"freerun.tools.check_env.recorded_episode", "freerun.tools.check_env.check_topics", "contextlib"}
"""Frames of these modules are left out of an environment's traceback."""


@dataclass
class RecordedEpisode:
    """One episode exactly as the environment returned it, and the faults that were found in it."""

    seed: int
    obs: list[object] = field(default_factory=list)
    """The first REPLAY_STEPS + 1 observations, because a long episode of images would not fit into memory."""
    last_obs: object = None
    actions: list[object] = field(default_factory=list)
    results: list[tuple[object, bool, bool]] = field(default_factory=list)
    """The reward, `terminated` and `truncated` of each step."""
    last_info: Mapping[str, object] = field(default_factory=dict)
    reset_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    reuses_buffer: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    """The first fault of each kind in remedies.FAULTS."""
    failure: str | None = None
    """What the environment raised, if it did."""

    @property
    def num_steps(self) -> int:
        return len(self.results)

    @property
    def ended(self) -> bool:
        return bool(self.results) and any(self.results[-1][1:])

    @property
    def place(self) -> str:
        return f"after {self.num_steps} steps of the episode with seed {self.seed}"

    def add_fault(self, kind: str, found: str) -> None:
        """Keep the first fault of each kind."""
        self.faults.setdefault(kind, f"{found}, {self.place}")

    def add_obs(self, space: spaces.Space[Any], obs: object) -> None:
        for kind, found in _obs_faults(space, obs):
            self.add_fault(kind, found)
        self.last_obs = copy.deepcopy(obs)  # the environment may write the next observation into the same array
        if len(self.obs) <= REPLAY_STEPS:
            self.obs.append(self.last_obs)

    def add_result(self, reward: Any, terminated: Any, truncated: Any) -> None:
        self.results.append((copy.copy(reward), bool(np.any(terminated)), bool(np.any(truncated))))
        # An array of zero dimensions is a number too, as many simulators return it.
        if not isinstance(reward, numbers.Real | np.bool_) and getattr(reward, "ndim", None) != 0:
            self.add_fault("reward", f"the reward is no number, but {short(reward)}")
        elif not math.isfinite(float(reward)):
            self.add_fault("reward", f"the reward is {float(reward)}")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if np.ndim(flag) or flag not in (False, True):
                self.add_fault("flag", f"{name} is no bool, but {short(flag)}")


def short(value: object) -> str:
    """Return a value in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:59] + "…"


def _obs_faults(space: spaces.Space[Any], obs: object) -> Iterator[tuple[str, str]]:
    """Yield the kind of each fault (see remedies.FAULTS) and its text, in the order in which training would fail."""
    try:
        flat = space if isinstance(space, spaces.Box) else spaces.utils.flatten_space(space)
        if not isinstance(flat, spaces.Box):
            return  # the space is not supported, which the topic `spaces` reports
        array = np.asarray(obs if flat is space else spaces.utils.flatten(space, obs))
        finite = np.isfinite(array)
    except NotImplementedError:
        return  # this space is not supported either
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        yield "unreadable", f"observation {short(obs)} does not fit {short(space)} ({error})"
        return
    if array.shape != flat.shape:
        yield "shape", f"the observation has shape {array.shape}, but observation_space says {flat.shape}"
        return
    if not finite.all():
        yield "finite", f"there is {array[~finite][0]} in the observation"
        return
    if isinstance(space, spaces.Box):
        # Gymnasium's own rule: a type that converts without loss, such as float32 to float64, fits the space.
        if isinstance(obs, np.ndarray) and not np.can_cast(obs.dtype, space.dtype):
            yield "dtype", f"the observation is {obs.dtype}, but observation_space says {space.dtype}"
        # Compare in the type of the bounds: a float64 may lie outside by less than the rounding to float32.
        rounded = array.astype(space.dtype) if space.dtype.kind == "f" else array
        outside = (rounded < space.low) | (rounded > space.high)
        if outside.any():
            low, high = space.low[outside][0], space.high[outside][0]
            yield "outside", f"observation value {array[outside][0]:.6g} lies outside {low:.6g} to {high:.6g}"
    else:
        with warnings.catch_warnings(action="ignore"):  # Gymnasium warns about lists, which freerun reads
            if not space.contains(obs):
                yield "outside", f"observation {short(obs)} lies outside its space"


@contextlib.contextmanager
def raising(doing: str) -> Iterator[None]:
    """Turn what the environment raises into an EnvFailure with the last two frames: the place and its caller."""
    try:
        yield
    except (EnvFailure, UserError):
        raise
    except Exception as error:
        frames = error.__traceback__
        # Skip the frames of this tool: the user's own code is what has to be mended.
        while frames and frames.tb_frame.f_globals["__name__"] in OUR_MODULES:
            frames = frames.tb_next
        lines = traceback.format_tb(frames, limit=-2) + traceback.format_exception_only(error)
        raise EnvFailure(f"{doing} raised\n{''.join(lines).rstrip()}") from None


def random_actions(env: Env, seed: int) -> Iterator[object]:
    """Yield random actions without end; where the environment has masks, such as it allows."""
    with raising("action_space.sample()"):
        space = copy.deepcopy(env.action_space)  # a copy, because the environment may draw from its own space
        space.seed(seed)
        while True:
            yield env.draw(space) if isinstance(env, RandomAllowedActions) else space.sample()


def play(env: Env, episode: RecordedEpisode, actions: Iterable[object], global_seed: int = 0) -> Iterator[None]:
    """Play one step for each `next` and record it. The global random generators start from `global_seed`."""
    random.seed(global_seed)
    np.random.seed(global_seed)
    with raising(f"reset(seed={episode.seed})"):
        space, started = env.observation_space, time.perf_counter()
        result: Any = env.reset(seed=episode.seed)
        episode.reset_seconds = time.perf_counter() - started
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            episode.add_fault("reset", f"reset() returns {type(result).__name__}, no pair of observation and info")
            result = (result, {})
        obs = result[0]
        episode.add_obs(space, obs)
    for action in actions:
        yield  # the caller decides after each step whether to go on
        episode.actions.append(action)
        before, given = obs, copy.deepcopy(action)  # a copy, because the environment may change its action
        with raising(f"step() {episode.place}"):
            started = time.perf_counter()
            result = env.step(given)
            episode.step_seconds.append(time.perf_counter() - started)
            if not isinstance(result, tuple) or len(result) not in (4, 5):
                episode.add_fault("step", f"step() returns {short(result)}, not five values")
                return
            if len(result) == 4:
                # The old interface had one flag `done`; the check continues as if it meant `terminated`.
                episode.add_fault("step", "step() returns four values, as in the old gym, not five")
                result = (*result[:3], False, result[3])
            obs, reward, terminated, truncated, info = result
            episode.add_result(reward, terminated, truncated)
            episode.add_obs(space, obs)
        # The same object twice means that an observation changes after it was returned.
        episode.reuses_buffer |= isinstance(obs, np.ndarray) and obs is before
        episode.last_info = info if isinstance(info, dict) else {}
        if not isinstance(info, dict):
            episode.add_fault("info", f"info is no dict, but {short(info)}")
        if episode.ended:
            return


def record(
    env: Env, seed: int, actions: Iterable[object], max_steps: int, max_seconds: float, global_seed: int = 0
) -> RecordedEpisode:
    """Play until the episode ends, the steps or the time are used up, or the environment raises."""
    episode = RecordedEpisode(seed)
    deadline = time.perf_counter() + max_seconds
    try:
        for _ in play(env, episode, actions, global_seed):
            if episode.num_steps >= max_steps or time.perf_counter() > deadline:
                break
    except (EnvFailure, UserError) as failure:
        episode.failure = str(failure)
    return episode


def replay(env: Env, episode: RecordedEpisode, seed: int | None = None, global_seed: int = 0) -> RecordedEpisode:
    """Play the same actions again, except one that raised."""
    seed, actions = episode.seed if seed is None else seed, episode.actions[: episode.num_steps]
    return record(env, seed, actions, REPLAY_STEPS, REPLAY_SECONDS, global_seed)


def replay_interleaved(other: Env, other_seed: int, env: Env, episode: RecordedEpisode) -> RecordedEpisode:
    """Play the same actions again, in turn with another environment, which shows whether the two share state."""
    again, actions = RecordedEpisode(episode.seed), episode.actions[: min(episode.num_steps, REPLAY_STEPS)]
    deadline = time.perf_counter() + 2 * REPLAY_SECONDS  # twice the time for two environments
    has_masks = isinstance(other, RandomAllowedActions)  # then its own episode allows other actions
    other_actions = random_actions(other, other_seed) if has_masks else iter(actions)
    for _ in zip(play(env, again, actions), play(other, RecordedEpisode(other_seed), other_actions), strict=False):
        if time.perf_counter() > deadline:
            break
    return again


def same(one: object, other: object) -> bool:
    """Return whether two observations or results are equal; NaN equals NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    first, second = np.asarray(one), np.asarray(other)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f")


def difference(one: RecordedEpisode, other: RecordedEpisode) -> str | None:
    """Say where two episodes first differ, as far as both were recorded; None if they do not."""
    for step, (first, second) in enumerate(zip(one.obs, other.obs, strict=False)):
        if step and not same(one.results[step - 1], other.results[step - 1]):
            return f"reward, terminated or truncated of step {step} differ"
        if not same(first, second):
            return f"the observation after {step} steps differs"
    return other.failure
