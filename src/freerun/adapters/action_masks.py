"""Where an environment says which of its discrete actions are allowed now, and how that is read."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Mapping
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import EnvFailure, UserError, mask_space

Env = gymnasium.Env[Any, Any]
Mask = NDArray[np.bool_]
MASK_KEY = "action_mask"
"""The name of the mask in an info or in a Dict observation, as in Gymnasium's Taxi and in PettingZoo."""
MASK_METHOD = "action_masks"
"""The method that returns the mask, as in sb3-contrib."""
SLOW_RESET_SECONDS = 10.0
SLOW_RESET = "the first reset of the environment has taken {:g} s so far; the run begins when it returns"

logger = logging.getLogger("freerun")


class MaskSource(Enum):
    """Where an environment has its masks. Where it has them twice, the first of these counts."""

    OBSERVATION = f'the key "{MASK_KEY}" of its observations'
    METHOD = f"its method {MASK_METHOD}()"
    INFO = f'the key "{MASK_KEY}" of its info'


def find_mask_source(env: Env) -> MaskSource | None:
    """Find out where an environment has masks. One with discrete actions that does not tell otherwise is reset once."""
    space = getattr(env, "observation_space", None)
    if isinstance(space, spaces.Dict) and MASK_KEY in space.spaces:
        return MaskSource.OBSERVATION
    if env.has_wrapper_attr(MASK_METHOD):
        return MaskSource.METHOD
    if not has_choices(getattr(env, "action_space", None)):
        return None
    # Nothing but a reset tells what an info holds. It happens in this process, where no hang detector watches.
    reminder = threading.Timer(SLOW_RESET_SECONDS, logger.warning, (SLOW_RESET.format(SLOW_RESET_SECONDS),))
    reminder.daemon = True  # Ctrl-C must not wait for it
    reminder.start()
    try:
        _, info = env.reset(seed=0)
    except (Exception, SystemExit):  # a worker will meet it again, and report it with the seed of its episode
        return None
    finally:
        reminder.cancel()
    return MaskSource.INFO if isinstance(info, Mapping) and MASK_KEY in info else None


def has_choices(action_space: object) -> bool:
    """True for discrete actions, the only ones that a mask can be for."""
    return isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete)


def usable_mask_source(env: Env) -> MaskSource | None:
    """Where an environment has masks for discrete actions."""
    return find_mask_source(env) if has_choices(getattr(env, "action_space", None)) else None


class MaskReader:
    """Reads masks and checks that each allows something."""

    def __init__(self, action_space: Any):
        sizes = [action_space.n] if isinstance(action_space, spaces.Discrete) else action_space.nvec
        self.space = mask_space(action_space)
        self.first_choices = np.cumsum([0, *sizes[:-1]])
        """Where the choices of each action begin in a mask."""

    @property
    def size(self) -> int:
        """The number of choices, of all actions together."""
        return self.space.shape[0]

    def read(self, found: Any) -> Mask:
        """Read the mask of one action, or the masks of several one after another. Raises ValueError if it is none."""
        # Gymnasium's own masks for MultiDiscrete are a tuple of arrays.
        if isinstance(found, list | tuple):
            found = np.concatenate([np.ravel(part) for part in found])
        mask: Mask = np.ravel(found) != 0
        if len(mask) != self.size:
            raise ValueError(f"it has {len(mask)} numbers, but there are {self.size} choices: give one for each choice")
        return mask

    def read_last(self, holder: Any) -> Mask:
        """Read the mask at the end of an episode from an info or an observation.

        No action follows, so environments may leave it out; then it is empty. After a truncation, a value function of
        actions (DQN) asks for the best of those that would be allowed."""
        try:
            return self.read(holder.get(MASK_KEY) if isinstance(holder, Mapping) else None)
        except (TypeError, ValueError):  # it may be anything there
            return np.zeros(self.size, np.bool_)

    def allows_something(self, mask: Mask) -> Any:
        """True if there is a choice for every action; of several masks [B, choices], an array [B]."""
        return np.logical_or.reduceat(mask, self.first_choices, axis=-1).all(axis=-1)


class EnvMasks:
    """The masks of one environment while it is played."""

    def __init__(self, source: MaskSource, action_space: Any):
        self._source = source
        self._reader = MaskReader(action_space)

    def sample(self, space: Any, mask: Mask) -> Any:
        """Draw a random action of the environment's own space that the mask allows."""
        parts = np.split(mask.astype(np.int8), self._reader.first_choices[1:])
        return space.sample(parts[0] if isinstance(space, spaces.Discrete) else tuple(parts))

    def read(self, env: Env, obs: Any, info: Any, place: str, has_ended: bool) -> Mask:
        """Return the mask for the next action. `place` says where the episode is, for errors."""
        if has_ended:
            return self._reader.read_last({MaskSource.OBSERVATION: obs, MaskSource.INFO: info}.get(self._source))
        found = self._call_method(env, place) if self._source is MaskSource.METHOD else None
        try:
            if self._source is not MaskSource.METHOD:
                found = (obs if self._source is MaskSource.OBSERVATION else info)[MASK_KEY]
            mask = self._reader.read(found)
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"the action mask cannot be read from {self._source.value} {place}: {reason}") from None
        if not self._reader.allows_something(mask):
            raise UserError(
                f"the action mask of the environment forbids every action {place}: allow at least one, or end the "
                "episode there"
            )
        return mask

    def _call_method(self, env: Env, place: str) -> Any:
        try:
            return env.get_wrapper_attr(MASK_METHOD)()
        except Exception:
            raise EnvFailure(f"the environment raised in {MASK_METHOD}, {place}\n{traceback.format_exc()}") from None


class RandomAllowedActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that can draw a random action which it allows now, for tools that play without a policy."""

    def __init__(self, env: Env, source: MaskSource):
        super().__init__(env)
        self._masks = EnvMasks(source, env.action_space)
        self._mask: Mask | None = None
        self._place: tuple[int, int | None] = 0, None
        self.num_allowed: list[int] = []
        """How many choices each action had."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result: Any = self.env.reset(seed=seed)
        self._place = 0, seed
        if isinstance(result, tuple) and len(result) == 2:
            self._note(*result, has_ended=False)
        return result

    def step(self, action: Any) -> Any:
        result: Any = self.env.step(action)
        self._place = self._place[0] + 1, self._place[1]
        if isinstance(result, tuple) and len(result) == 5:
            self._note(result[0], result[4], bool(result[2] or result[3]))
        return result

    def _note(self, obs: Any, info: Any, has_ended: bool) -> None:
        place = "after {} steps of the episode with seed {}".format(*self._place)
        self._mask = self._masks.read(self.env, obs, info, place, has_ended)

    def draw(self, space: Any) -> Any:
        """Draw an action from the environment's action space, or from a copy of it."""
        if self._mask is None:  # it has returned something else than a reset should
            return space.sample()
        self.num_allowed.append(int(self._mask.sum()))
        return self._masks.sample(space, self._mask)
