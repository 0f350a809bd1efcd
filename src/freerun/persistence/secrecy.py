"""Secrets are for environments, not for files: what looks like one is never written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from freerun.core import UserError

HIDDEN = "(a secret: not kept)"
SURE_NAMES = re.compile(
    r"pass(word|wd|phrase)?$|secret|api_?key|access_?key|private_?key|credential|(^|_)(token|pwd|auth|jwt|bearer|cookie)$",
    re.IGNORECASE,
)
"""Of which a number is one too; `num_tokens` is not among them."""
NAMES = re.compile(rf"{SURE_NAMES.pattern}|token", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
SHORTEST = 8
"""Characters of a value in the process's environment that is taken for one: `false` is none."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a file may hold them."""
    known = _in_environment()
    kept = {name: HIDDEN if _looks_secret("", value, known) else value for name, value in options.items()}
    env_args = options.get("env_args")
    if isinstance(env_args, Mapping):
        kept["env_args"] = {
            name: HIDDEN if _looks_secret(name, value, known) else value for name, value in env_args.items()
        }
    return kept


def _looks_secret(name: str, value: Any, known: frozenset[str]) -> bool:
    if isinstance(value, str):
        return bool(NAMES.search(name) or IN_ADDRESS.search(value)) or value in known
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(SURE_NAMES.search(name))


def _in_environment() -> frozenset[str]:
    """WANDB_API_KEY, HF_TOKEN and their like."""
    found = (value for name, value in os.environ.items() if NAMES.search(name))
    return frozenset(value for value in found if len(value) >= SHORTEST)


class Veil:
    """Covers secrets in what is said: an environment's error may hold the address, or the key, that it failed with."""

    def __init__(self, options: Mapping[str, Any]):
        self.has_secrets = has_hidden(without_secrets(options))
        """Whether there are some among these settings."""
        secrets = sorted({*_in_environment(), *_values_hidden(options)}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    def cover(self, text: str) -> str:
        text = IN_ADDRESS.sub(HIDDEN, text)
        return text if self._secrets is None else self._secrets.sub(HIDDEN, text)


def _values_hidden(options: Mapping[str, Any]) -> Iterator[str]:
    kept = without_secrets(options)
    env_args, kept_args = options.get("env_args"), kept.get("env_args")
    for before, after in ((options, kept), (env_args, kept_args)):
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            values = (before[name] for name, value in after.items() if value == HIDDEN)
            # Of a short number any text may hold the digits.
            yield from (value for value in values if isinstance(value, str) and len(value) > 3 and value != HIDDEN)


def has_hidden(options: Mapping[str, Any]) -> bool:
    try:
        refuse_hidden(options)
    except UserError:
        return True
    return False


def refuse_hidden(options: Mapping[str, Any]) -> None:
    """Settings from a file may lack what it must not hold."""
    env_args = options.get("env_args")
    for name, value in env_args.items() if isinstance(env_args, Mapping) else ():
        if value == HIDDEN:
            raise UserError(f"--env-args {name} is a secret, which no file keeps: give it again")
    for name, value in options.items():
        if value == HIDDEN:
            raise UserError(f"--{name.replace('_', '-')} holds a secret, which no file keeps: give it again")
