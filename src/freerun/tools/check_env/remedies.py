"""The advice of `freerun check-env`: how to mend each fault that an environment may have."""

from __future__ import annotations

from typing import Literal

Level = Literal["ok", "warning", "problem"]

END = "wrap it in gymnasium.wrappers.TimeLimit, or train with --max-episode-steps"
FIVE = "return obs, reward, terminated, truncated, info: the old gym's `done` is split in two"
SEED = "call super().reset(seed=seed) and draw every random number from self.np_random"
SPACES = "set self.action_space and self.observation_space in __init__"
FAULTS: dict[str, tuple[str, Level, str]] = {
    "reset": ("interface", "problem", "return obs, info from reset; an empty dict will do as info"),
    "step": ("interface", "problem", FIVE),
    "info": ("interface", "problem", "return a dict as info; an empty one will do"),
    "unreadable": ("values", "problem", "return what observation_space declares, or declare what is returned"),
    "shape": ("values", "problem", "give the observation and observation_space the same shape"),
    "finite": ("values", "problem", "look for a division by zero or an overflow; freerun refuses NaN and infinity"),
    "reward": ("values", "problem", "return the reward as one finite number: float(reward)"),
    "flag": ("values", "problem", "return bool(terminated) and bool(truncated)"),
    "dtype": (
        "values",
        "warning",
        "return obs.astype(self.observation_space.dtype): freerun converts it at every step",
    ),
    "outside": ("spaces", "warning", "widen the bounds of observation_space, or clip; freerun does not use them"),
}
"""The faults that a single step can have: the topic, the level, and how to mend it."""
REMEDIES = {
    "unexpected keyword argument 'seed'": f"write `def reset(self, *, seed=None, options=None)`, {SEED}",
    "to unpack (expected 5": FIVE,
    "no attribute 'action_space'": SPACES,
    "no attribute 'observation_space'": SPACES,
}
"""How to mend exceptions whose cause is known from a part of their text."""
