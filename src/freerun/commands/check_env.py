"""`freerun check-env`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro
from rich.console import Console

from freerun.parsing import EnvArgs, parse


@dataclass(frozen=True)
class _CheckEnv:
    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]
    """A Gymnasium id or your own as module:callable."""
    episodes: int = 3
    """Episodes to try, with random actions."""
    env_args: EnvArgs = field(default_factory=dict)
    """Arguments for the environment, as names and values."""


def check_env(words: list[str]) -> int:
    """Look for what is wrong with an environment, and say how to mend it."""
    options = parse(_CheckEnv, words, prog="freerun check-env", description=check_env.__doc__)
    from freerun.envs.check import check, print_report

    findings = check(options.env, options.env_args, options.episodes)
    print_report(options.env, findings, Console())
    return 0 if all(finding.good for finding in findings) else 1
