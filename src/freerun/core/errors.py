"""Errors in words that a user understands, and checks of what a user gives."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freerun.core.data import Segment

SCRIPT = "__main__"
"""The module name of the running script. Every program has another script under this name."""


class UserError(Exception):
    """Bad input. The text is one sentence that says what to do; the command line prints it and exits with 2."""


class EnvFailure(Exception):
    """An environment raised an exception. The text has its traceback and the seed of the episode."""

    worker: int | None = None
    from_outside = False
    """True if something other than the environment ended the worker."""
    may_be_the_environment = False
    """With `from_outside`: True if the environment may have caused it after all, because nobody saw how it ended."""


class WorkerDied(EnvFailure):
    """The process of a worker ended without a message."""


class OutOfMemory(WorkerDied):
    """The kernel killed the process of a worker because memory ran out."""

    may_be_the_environment = True  # it may need more memory than the machine has


class WorkerHung(EnvFailure):
    """A worker showed no sign of life for longer than the step timeout."""


class LearnerFailure(Exception):
    """Another of several learners failed or is gone. The text says which one and why."""


class CallbackFailure(Exception):
    """A callback of the user's raised an exception. The text names the callback and has its traceback."""


class StopRun(Exception):
    """Ends a run cleanly, after its checkpoint is written. A callback may raise it; the text is the reason."""

    outcome = "stopped"
    """What summary.json says."""


class PruneRun(StopRun):
    """Ends a run that is not worth going on with, as a search over settings does."""

    outcome = "pruned"


class NotFinite(UserError):
    """NaN or infinity in what an environment returned, a policy chose or a learner computed."""

    episode: int | None = None
    seed: int | None = None
    step: int | None = None
    evidence: Segment | None = None
    """The steps of the episode up to this point, as far as they are available."""


def import_callable(name: str, what: str) -> Callable[..., Any]:
    """Import the function or class that a user has named as module:callable."""
    module_name, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {name!r}: {error}; is its folder on PYTHONPATH?") from None
    except AttributeError:
        # The same name means another module in every program, so say what to do about it.
        if module_name == SCRIPT:
            raise UserError(_lost_with_its_script(attribute, what)) from None
        raise UserError(f"{what} {name!r}: module {module_name!r} has no {attribute!r}") from None
    if not callable(target):
        raise UserError(f"{what} {name!r} is not callable: name a class or a function that returns one")
    return target  # type: ignore[no-any-return]


def _lost_with_its_script(attribute: str, what: str) -> str:
    return (
        f"{what} {attribute!r} was defined in the script that trained the run, where no other program finds it: move "
        f'it into a module, write that as "my_module:{attribute}" into the run\'s config.json in the place of '
        f'"{SCRIPT}:{attribute}", and trust it (--trust my_module:{attribute})'
    )


def callable_name(target: str | Callable[..., Any]) -> str:
    """Return the name of a function or class as module:callable, the reverse of `import_callable`."""
    if isinstance(target, str):
        return target
    # A functools.partial, for example, has no name of its own.
    return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def is_found_by_name(target: str | Callable[..., Any]) -> bool:
    """True if another program can import it. What a script or a function defines for itself cannot be imported."""
    module_name, _, attribute = callable_name(target).partition(":")
    if module_name == SCRIPT:
        return False
    return isinstance(target, str) or getattr(sys.modules.get(module_name), attribute, None) is target


def require_positive(settings: object, *names: str) -> None:
    """Refuse settings below 1. A setting may be a number, a tuple of numbers, or None if it was not given."""
    for name in names:
        given = getattr(settings, name)
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
