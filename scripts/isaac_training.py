"""What the two scripts for Isaac Lab share: they call `freerun train` with MBPO and the original's flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from freerun.adapters import isaac_launch
from freerun.tools.cli.main import main

TASK = "Isaac-Exploration-Rough-Drone-v0"
ACTION_LIMIT = "1.0"
"""MBPO needs limits of the actions, and Isaac Lab sets none."""


def train(mode: str, without: Mapping[str, str], words: Sequence[str]) -> int:
    """Call `freerun train` in a mode. Flags that belong to the other mode are left out, and a line says why."""
    words = list(words)
    for flag, reason in without.items():
        words = _leave_out(words, flag, reason)
    defaults = ["--algo", "mbpo", "--mode", mode]
    if not _has(words, "--task"):
        defaults += ["--task", TASK]
    if isaac_launch.is_installed() and not _has(words, "--env-args"):
        defaults += ["--env-args", "clip_actions", ACTION_LIMIT]
    return main(["train", *defaults, *words])


def _flag(word: str) -> str:
    """The name of a flag: that of --num_envs=8 and of --num-envs is --num-envs."""
    return word.partition("=")[0].replace("_", "-")


def _has(words: Sequence[str], flag: str) -> bool:
    return any(_flag(word) == flag for word in words)


def _leave_out(words: Sequence[str], flag: str, reason: str) -> list[str]:
    kept, rest = [], iter(words)
    for word in rest:
        if _flag(word) != flag:
            kept.append(word)
            continue
        print(f"{word.partition('=')[0]} is ignored: {reason}", file=sys.stderr)
        if "=" not in word:
            next(rest, None)  # the flag's value
    return kept
