"""Callbacks: the user's own code after every update. It sees what the run has reached, and may change or end it."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from freerun.collecting.env_args_channel import EnvArgsChannel
from freerun.core import (
    CallbackFailure,
    Counts,
    PruneRun,
    StopRun,
    Tunable,
    TunableCollector,
    UserError,
    callable_name,
)
from freerun.persistence.checkpoint import Checkpoint
from freerun.run.run_parts import RunParts
from freerun.run.trained_policy import TrainedPolicy, own_settings
from freerun.settings.config import AnyConfig
from freerun.settings.factories import resizable_settings
from freerun.settings.own_classes import check_parts
from freerun.settings.registry import find_algorithm

ENV_ARGS_STATE = "changed_env_args"
"""The entry of a checkpoint that holds what `set_env_args` has set."""
TUNABLES_STATE = "changed_tunables"
"""The entry of a checkpoint that holds what `change` has set."""


class Update:
    """An update that has just been made, as a callback sees it."""

    def __init__(self, hooks: UpdateHooks, step: int, metrics: Mapping[str, float]):
        self._hooks = hooks
        self.step = step
        """The environment steps so far."""
        self.metrics = metrics
        """The record of the update, as metrics.jsonl holds it."""

    @property
    def number(self) -> int:
        """The number of updates so far."""
        return self._hooks.parts.ledger.version

    @property
    def episodes(self) -> int:
        """The episodes so far."""
        return self._hooks.parts.ledger.episodes

    @property
    def counts(self) -> Counts:
        """What the mode has counted: units started and delivered, steps dropped, workers restarted."""
        return self._hooks.parts.collector.counts()

    @property
    def config(self) -> AnyConfig:
        """The settings of the run."""
        return self._hooks.parts.config

    @property
    def run_dir(self) -> Path:
        return self._hooks.run_dir

    @functools.cached_property
    def policy(self) -> TrainedPolicy:
        """A copy of the policy as it is now. It acts (`policy.predict(obs)`), and `freerun.evaluate` takes it."""
        parts = self._hooks.parts
        return TrainedPolicy(
            copy.deepcopy(parts.algorithm.policy), parts.spaces, functools.partial(own_settings, parts.config)
        )

    def stop(self, reason: str) -> None:
        """End the run after this update, with its checkpoint and its results."""
        self._hooks.end(StopRun(reason))

    def prune(self, reason: str) -> None:
        """End the run as `stop` does, and note that it was not worth going on with."""
        self._hooks.end(PruneRun(reason))

    @property
    def tunables(self) -> dict[str, float]:
        """What `change` may change in this run, with the values in force."""
        return {name: tunable.read() for name, tunable in self._hooks.tunables.items()}

    def change(self, name: str, value: float) -> None:
        """Set a tunable to another value, from the next update on."""
        self._hooks.change(name, value)

    def set_env_args(self, **env_args: Any) -> None:
        """Give all environments other arguments. Each takes them when it next resets with the weights of the next
        update."""
        self._hooks.set_env_args(env_args)


Callback = Callable[[Update], object]


@dataclass(frozen=True)
class NamedCallback:
    """A callback, and the name by which users know it."""

    name: str
    call: Callback


def changes_env_args(callbacks: Sequence[NamedCallback], resumed: Checkpoint | None) -> bool:
    """True if arguments of environments may change in a run, or have changed before it was resumed."""
    return bool(callbacks) or (resumed is not None and bool(resumed.state.get(ENV_ARGS_STATE)))


def find_callbacks(names: Sequence[str], on_update: Callback | None) -> list[NamedCallback]:
    """Make the callbacks of a run: an object of each class that is named, and a function that Python code passed."""
    found = [NamedCallback(name, check_parts("callback", name)().on_update) for name in names]
    if on_update is not None:
        if not callable(on_update):
            raise UserError(f"on_update must be a function that takes an update, not {on_update!r}")
        found.append(NamedCallback(callable_name(on_update), on_update))
    return found


class UpdateHooks:
    """A sink that calls the callbacks.

    It comes before the checkpoint, which thus holds what they have changed. If they end the run, it ends after the
    checkpoint: `AfterCheckpoint` raises why.
    """

    def __init__(
        self, callbacks: Sequence[NamedCallback], parts: RunParts, channel: EnvArgsChannel | None, run_dir: Path
    ):
        self.parts, self.run_dir = parts, run_dir
        self._callbacks = callbacks
        self._channel = channel
        self._changed_tunables: dict[str, float] = {}
        self._ending: Exception | None = None

    @functools.cached_property
    def tunables(self) -> dict[str, Tunable]:
        from freerun.algorithms.learners.learning_tunables import changeable_settings  # it imports torch

        config, algorithm = self.parts.config, self.parts.algorithm
        found = changeable_settings(algorithm, find_algorithm(config.algo).traits)
        if resizable_settings(config.env, config.mode):
            found += cast(TunableCollector, self.parts.collector).tunables()
        return {tunable.name: tunable for tunable in found}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        update = Update(self, step, metrics)
        for callback in self._callbacks:
            try:
                callback.call(update)
            except (StopRun, UserError) as ending:
                self.end(ending)
            except Exception:
                self.end(
                    CallbackFailure(
                        f"the callback {callback.name} raised after update {update.number}\n{traceback.format_exc()}"
                    )
                )
            if isinstance(self._ending, CallbackFailure | UserError):
                return

    def end(self, ending: Exception) -> None:
        """Have the run end after the checkpoint of this update. A failure says more than a wish to stop."""
        if self._ending is None or not isinstance(ending, StopRun):
            self._ending = ending

    def change(self, name: str, value: float) -> None:
        if name not in self.tunables:
            known = ", ".join(self.tunables) or "nothing"
            raise UserError(f"a callback cannot change {name!r} in this run: it can change {known}")
        tunable = self.tunables[name]
        if tunable.fit(value) != value:
            whole = "whole numbers " if tunable.is_whole else ""
            raise UserError(f"{name} takes {whole}from {tunable.low:g} to {tunable.high:g}, not {value!r}")
        tunable.apply(value)
        self._changed_tunables[name] = value

    def set_env_args(self, env_args: Mapping[str, Any]) -> None:
        if self._channel is None:
            raise UserError(
                "set_env_args cannot reach environments that are tensors, because they reset themselves: "
                "let the simulator change its arguments itself"
            )
        self._channel.change(env_args)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        channel = self._channel
        state: dict[str, Any] = {}
        if self._changed_tunables:
            state[TUNABLES_STATE] = dict(self._changed_tunables)
        if channel is not None and channel.env_args:
            state[ENV_ARGS_STATE] = {"published": channel.published, "newest": channel.env_args}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the arguments of environments and the settings of the algorithm that a checkpoint was written
        with. How many workers there are, and the like, is the resumed run's own to say."""
        from freerun.algorithms.learners.learning_tunables import restore_settings  # it imports torch

        algorithm = self.parts.algorithm
        try:
            if self._channel is not None and ENV_ARGS_STATE in state:
                self._channel.restore(**{name: dict(args) for name, args in state[ENV_ARGS_STATE].items()})
            if TUNABLES_STATE in state:
                self._changed_tunables = {str(name): float(value) for name, value in state[TUNABLES_STATE].items()}
                restore_settings(algorithm, find_algorithm(self.parts.config.algo).traits, self._changed_tunables)
        except (TypeError, ValueError, AttributeError) as error:  # a checkpoint may come from anywhere
            raise UserError(f"the checkpoint does not fit this run: {error}") from None

    def summary(self) -> dict[str, Any]:
        """Return what callbacks have changed, for summary.json: such a run differs from its settings."""
        env_args = self._channel.env_args if self._channel is not None else {}
        changed = {**({"env_args": env_args} if env_args else {}), **self._changed_tunables}
        return {"changed_by_callbacks": changed} if changed else {}

    def close(self) -> None:
        """Callbacks that hold something open close it themselves."""

    def raise_ending(self) -> None:
        if self._ending is not None:
            raise self._ending


class AfterCheckpoint:
    """The last sink of all: it ends the run if a callback has asked for it."""

    def __init__(self, hooks: UpdateHooks):
        self._hooks = hooks

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._hooks.raise_ending()

    def close(self) -> None:
        """It holds nothing open."""
