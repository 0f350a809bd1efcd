"""Settings that belong to one environment: which they are, and what to say where another environment gets them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from freerun.adapters.catalog import ENV_SETTINGS
from freerun.core import EnvSettings, UserError, import_callable

NOT_GIVEN: tuple[object, ...] = (None, (), [])
"""The values of a setting that nobody has given."""


def settings_class(env: object) -> type[EnvSettings]:
    """Return the class of settings that an environment declares; `EnvSettings`, which has no fields, for most."""
    # An environment may also be given as a callable: it has no settings of its own.
    return _class(env) if isinstance(env, str) and env in ENV_SETTINGS else EnvSettings


@functools.cache
def _class(env: str) -> type[EnvSettings]:
    return import_callable(ENV_SETTINGS[env], "settings")  # type: ignore[return-value]


def named_env(words: Sequence[str]) -> str | None:
    """Find an environment with settings of its own among the words of a command line: its flags depend on it."""
    # Which word is ENV cannot be known before the flags are parsed, but such an id is hardly the value of another flag.
    return next((word for word in words if word in ENV_SETTINGS), None)


def without_unset(options: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """Leave out settings of other environments that were not given. `known` are the settings that the run has.

    Version 0.1.0 wrote them into the config.json of every run, with null for "not given".
    """
    unset = {name for name in options.keys() - known if owners(name) and options[name] in NOT_GIVEN}
    return {name: value for name, value in options.items() if name not in unset}


def fitted(settings: EnvSettings, env: object) -> EnvSettings:
    """Return the settings for `env`, if they may have been read for another environment, such as that of a file."""
    kind = settings_class(env)
    if type(settings) is kind:
        return settings
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    given = {name: value for name, value in given.items() if value not in NOT_GIVEN}
    for name in given.keys() - _names(kind):
        refuse(name, env)
    return kind(**given)


def owners(name: str) -> list[str]:
    """Return the environments that have a setting of this name."""
    return [env for env in ENV_SETTINGS if name in _names(_class(env))]


def refuse(name: str, env: object) -> None:
    """Raise UserError for a setting that other environments have, and this one has not."""
    if (envs := owners(name)) and env not in envs:
        raise UserError(f"--{name.replace('_', '-')} is a setting of {' and '.join(envs)} only: leave it out")


def _names(kind: type[EnvSettings]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}
