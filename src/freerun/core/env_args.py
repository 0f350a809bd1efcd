"""Arguments of environments that change while a run goes on, as a curriculum has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

ENV_ARGS_OPTION = "freerun_env_args"
"""The name under which `reset` is given changed arguments, where the environment has a process of its own."""


@runtime_checkable
class ChangeableEnv(Protocol):
    """An environment that takes other arguments without being built anew."""

    def set_env_args(self, **env_args: Any) -> None:
        """Take these arguments. It is called right before a reset, with all arguments that have changed so far."""
        ...


class EnvArgsBox:
    """The newest arguments that have reached this process. Each of its environments looks here before it resets."""

    def __init__(self) -> None:
        # One tuple, because threads of one process share the box: none may see half of a change.
        self._newest: tuple[int, Mapping[str, Any]] = 0, {}

    @property
    def newest(self) -> tuple[int, Mapping[str, Any]]:
        """How many changes there were, and all arguments that have changed."""
        return self._newest

    def take(self, number: int, env_args: Mapping[str, Any]) -> None:
        """Note a change, unless a later one has arrived before: threads take weights in any order."""
        if number > self._newest[0]:
            self._newest = number, env_args

    def __deepcopy__(self, memo: dict[int, Any]) -> EnvArgsBox:
        """Copies of a policy fill the same box: the environments beside them look into that one."""
        return self
