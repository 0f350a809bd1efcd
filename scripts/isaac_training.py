"""What the two scripts for Isaac Lab share: MBPO by `freerun train`, with the flags of the original."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from freerun.cli import main
from freerun.envs import isaac_launch

TASK = "Isaac-Exploration-Rough-Drone-v0"
ACTION_LIMIT = "1.0"
"""Isaac Lab's actions have none, and MBPO needs one."""


def train(mode: str, without: Mapping[str, str], words: Sequence[str]) -> int:
    """`freerun train` in a mode; flags that are another mode's are left out, with a word on why."""
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
    """--num_envs=8 and --num-envs are one flag."""
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
            next(rest, None)  # its value
    return kept
