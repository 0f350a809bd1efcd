"""Wrappers around environments that users choose by name with --wrap: Gymnasium's own, and a stack of frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freerun.core import Array, RequiredPackage, UserError

Build = Callable[[Mapping[str, Any]], "gymnasium.Env[Any, Any]"]
"""Builds the environment itself, with arguments that are added to those of its constructor."""
ATARI = RequiredPackage("ale_py", "the Arcade Learning Environment", "atari", also=("cv2",))
ATARI_FRAMES = 4
BLOCK_FRAMES = 64
"""A stack of frames is a part of a block of memory for this many. The next block begins with the end of the last."""


class FrameStack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations are the newest frames, [frames, ...], the newest last. The first one stands for those before it.

    It returns the same as Gymnasium's FrameStackObservation, but writes each frame once: the frames lie one after
    another in memory, and a stack is a view of some of them. What was returned is never overwritten.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], num_frames: int):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise UserError(f"frames can be stacked where observations are a Box, not {space}")
        low, high = (np.repeat(limit[None], num_frames, axis=0) for limit in (space.low, space.high))
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)
        self.num_frames = num_frames
        """The frames of an observation."""
        self._shape, self._dtype = space.shape, space.dtype
        self._next = 0  # where the next frame goes in the block

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        frame, info = self.env.reset(seed=seed, options=options)
        self._begin_block()
        self._block[: self.num_frames] = frame
        return self._block[: self.num_frames], info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        frame, reward, terminated, truncated, info = self.env.step(action)
        if self._next == len(self._block):
            newest = self._block[1 - self.num_frames :] if self.num_frames > 1 else self._block[:0]
            self._begin_block()
            self._next = len(newest)
            self._block[: self._next] = newest
        self._block[self._next] = frame
        self._next += 1
        return self._block[self._next - self.num_frames : self._next], reward, terminated, truncated, info

    def _begin_block(self) -> None:
        self._block: Array = np.empty((BLOCK_FRAMES + self.num_frames, *self._shape), self._dtype)
        self._next = self.num_frames


def wrap_atari(build: Build) -> gymnasium.Env[Any, Any]:
    """84 × 84 grey pixels, four frames per action, up to 30 idle frames at the start, and the newest four observations.

    The defaults of Gymnasium's AtariPreprocessing, which follow Machado et al. 2018: the loss of a life ends nothing.
    """
    ATARI.require("--wrap atari")
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # or every worker greets on the terminal
    gymnasium.register_envs(ale_py)
    try:
        # The wrapper repeats actions, so the environment itself must not.
        env = build({"frameskip": 1})
    except UserError as error:
        raise UserError(f"--wrap atari is for Atari games such as ALE/Pong-v5: {error}") from None
    return FrameStack(gymnasium.wrappers.AtariPreprocessing(env), ATARI_FRAMES)


WRAPPERS: dict[str, Callable[[Build], gymnasium.Env[Any, Any]]] = {"atari": wrap_atari}
"""By the names that --wrap takes."""


def build_wrapped(wrap: str | None, build: Build) -> gymnasium.Env[Any, Any]:
    """Build an environment, inside the wrapper of this name if there is one."""
    if wrap is None:
        return build({})
    if wrap not in WRAPPERS:
        raise UserError(f"there is no --wrap {wrap}: choose {' or '.join(WRAPPERS)}")
    return WRAPPERS[wrap](build)
