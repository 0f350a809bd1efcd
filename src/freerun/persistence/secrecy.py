"""Secrets are for environments, not for files: what looks like one is never written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from freerun.core import UserError

HIDDEN = "(a secret: not kept)"
NAMES = re.compile(r"pass(word|wd|phrase)?$|secret|token|api_?key|access_?key|private_?key|credential", re.IGNORECASE)
IN_ADDRESS = re.compile(r"://[^/\s@]+@")


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a file may hold them."""
    env_args = options.get("env_args")
    if not isinstance(env_args, Mapping):
        return dict(options)
    return {**options, "env_args": {name: _shown(name, value) for name, value in env_args.items()}}


def _shown(name: str, value: Any) -> Any:
    is_secret = NAMES.search(name) or (isinstance(value, str) and IN_ADDRESS.search(value))
    return HIDDEN if is_secret and isinstance(value, str) else value


def refuse_hidden(options: Mapping[str, Any]) -> None:
    """Settings from a file may lack what it must not hold."""
    env_args = options.get("env_args")
    for name, value in env_args.items() if isinstance(env_args, Mapping) else ():
        if value == HIDDEN:
            raise UserError(f"--env-args {name} is a secret, which no file keeps: give it again")
