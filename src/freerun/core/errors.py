"""What can go wrong, in the words of the user, and the checks of what a user gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freerun.core.data import Segment


class UserError(Exception):
    """Bad input, told in one sentence that says what to do. The command line prints it and exits with 2."""


class EnvFailure(Exception):
    """An environment raised: the text holds its own traceback and the episode's seed."""

    worker: int | None = None
    from_outside = False
    """Whether the environment had no part in it, as far as anybody can tell."""


class WorkerDied(EnvFailure):
    """Its process ended without a word."""


class OutOfMemory(WorkerDied):
    """The kernel took its process, for lack of memory."""


class WorkerHung(EnvFailure):
    """It showed no sign of life for longer than the step timeout."""


class LearnerFailure(Exception):
    """Another of several learners failed, or is gone: the text says which and why."""


class NotFinite(UserError):
    """NaN or infinity, in what an environment returned, a policy chose or a learner computed."""

    episode: int | None = None
    seed: int | None = None
    step: int | None = None
    evidence: Segment | None = None
    """The steps of the episode up to there, as far as they are at hand."""


def import_callable(name: str, what: str) -> Callable[..., Any]:
    """The function or class that a user has named as module:callable."""
    module_name, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {name!r}: {error}; is its folder on PYTHONPATH?") from None
    except AttributeError:
        advice = " (a script's own; put it into a module to use it from elsewhere)" if module_name == "__main__" else ""
        raise UserError(f"{what} {name!r}: module {module_name!r} has no {attribute!r}{advice}") from None
    if not callable(target):
        raise UserError(f"{what} {name!r} is not callable: name a class or a function that returns one")
    return target  # type: ignore[no-any-return]


def callable_name(target: str | Callable[..., Any]) -> str:
    """The reverse of `import_callable`, for what was given as an object."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def require_positive(settings: Any, *names: str) -> None:
    """Each of these settings must be at least 1, or all of its numbers, where it is given at all."""
    for name in names:
        given = getattr(settings, name)
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
