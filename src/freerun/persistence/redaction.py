"""Keeps secrets out of files: a setting that looks like a secret is never written."""

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
"""Names of settings whose value is a secret even if it is a number. `num_tokens` does not match."""
LIKELY_NAMES = re.compile(rf"{SURE_NAMES.pattern}|token", re.IGNORECASE)
CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
SHORTEST_SECRET = 8
"""An environment variable with a shorter value is not taken for a secret: `false` is none."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a file may hold them: each secret is replaced by a remark."""
    # freerun's own settings have fixed names, so only their values are judged. Names of env_args are the user's.
    known = _environment_secrets()
    shown = {name: HIDDEN if _looks_secret("", value, known) else value for name, value in options.items()}
    env_args = options.get("env_args")
    if isinstance(env_args, Mapping):
        shown["env_args"] = {
            name: HIDDEN if _looks_secret(name, value, known) else value for name, value in env_args.items()
        }
    return shown


def _looks_secret(name: str, value: object, known: frozenset[str]) -> bool:
    if isinstance(value, str):
        return bool(LIKELY_NAMES.search(name) or CREDENTIALS_IN_URL.search(value)) or value in known
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(SURE_NAMES.search(name))


def _environment_secrets() -> frozenset[str]:
    """Return the values of variables such as WANDB_API_KEY and HF_TOKEN."""
    found = (value for name, value in os.environ.items() if LIKELY_NAMES.search(name))
    return frozenset(value for value in found if len(value) >= SHORTEST_SECRET)


class SecretRedactor:
    """Replaces secrets in messages: an environment's error may contain the address or the key with which it failed."""

    def __init__(self, options: Mapping[str, Any]):
        self.has_secrets = has_redacted(without_secrets(options))
        """True if there are secrets among these settings."""
        # The longest first: if one secret begins with another, the whole of it must be replaced.
        secrets = sorted({*_environment_secrets(), *_secret_values(options)}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    def redact(self, text: str) -> str:
        """Return the text without secrets."""
        text = CREDENTIALS_IN_URL.sub(HIDDEN, text)
        return text if self._secrets is None else self._secrets.sub(HIDDEN, text)


def _secret_values(options: Mapping[str, Any]) -> Iterator[str]:
    shown = without_secrets(options)
    env_args, shown_args = options.get("env_args"), shown.get("env_args")
    for before, after in ((options, shown), (env_args, shown_args)):
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            values = (before[name] for name, value in after.items() if value == HIDDEN)
            # Numbers and very short values are left out: any text may contain them by chance.
            yield from (value for value in values if isinstance(value, str) and len(value) > 3 and value != HIDDEN)


def has_redacted(options: Mapping[str, Any]) -> bool:
    try:
        refuse_redacted(options)
    except UserError:
        return True
    return False


def refuse_redacted(options: Mapping[str, Any]) -> None:
    """Raise UserError if these settings come from a file and lack a secret that the file must not hold."""
    env_args = options.get("env_args")
    for name, value in env_args.items() if isinstance(env_args, Mapping) else ():
        if value == HIDDEN:
            raise UserError(f"--env-args {name} is a secret, which no file keeps: give it again")
    for name, value in options.items():
        if value == HIDDEN:
            raise UserError(f"--{name.replace('_', '-')} holds a secret, which no file keeps: give it again")
