"""`freerun check-env`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from rich.console import Console

from freerun.settings.flag_parsing import EnvArgs, parse


@dataclass(frozen=True)
class _CheckEnvFlags:
    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]
    """A Gymnasium id, or your own environment as module:callable."""
    episodes: int = 3
    """The number of episodes to play, with random actions."""
    env_args: EnvArgs = field(default_factory=dict)
    """Arguments for the environment, as names and values."""
    wrap: Literal["atari"] | None = None
    """Wrappers around the environment, as in `freerun train`."""


def check_env(words: list[str]) -> int:
    """Look for mistakes in an environment, and say how to fix them."""
    options = parse(_CheckEnvFlags, words, prog="freerun check-env", description=check_env.__doc__)
    from freerun.tools.check_env.checks import check, print_report

    findings = check(options.env, options.env_args, options.episodes, options.wrap)
    print_report(options.env, findings, Console())
    return 0 if all(finding.good for finding in findings) else 1
