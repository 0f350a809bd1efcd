"""What Python programs call: `freerun.train()` and `freerun.resume()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from freerun.core import TensorEnv
from freerun.envs.tensors import give
from freerun.experiment import Result, run
from freerun.persistence import origin
from freerun.presets import settings_of
from freerun.probing import auto
from freerun.registry import make_config
from freerun.resuming import newest
from freerun.resuming import settings_of as settings_of_run


def train(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | TensorEnv, *, preset: str | Sequence[str] = (), **settings: Any
) -> Result:
    """Train an agent: `train("CartPole-v1", total_steps=50_000, mode="pipes")`. Settings are the flags' names.

    The environment may also be a `core.TensorEnv` or an RSL-RL VecEnv that is there already; it is closed at the end.
    """
    if hasattr(env, "num_envs") and hasattr(env, "device"):
        settings = {"num_envs": env.num_envs, "device": str(env.device), **settings}
        env = give(env)
    names = [preset] if isinstance(preset, str) else preset
    options = {**settings_of(names), "env": env, **settings}
    if auto.is_open(options):
        return run(auto.settle(options, lambda mode: make_config(auto.in_mode(options, mode))))
    return run(make_config(options))


def resume(run_dir: str | Path, *, trust: Sequence[str] = (), **changes: Any) -> Result:
    """Go on with a run that was stopped or killed: `resume("runs/…", total_steps=200_000)`.

    Code that the folder names must have been trained there by you, or be named again with `trust`.
    """
    path = Path(run_dir)
    found = newest(path)
    auto.refuse(changes, "a run goes on in the mode that is named, or in its own")
    options = {**settings_of_run(found, path, changes.get("mode")), **changes}
    origin.check(options, path, [*trust, *(str(value) for value in changes.values())])
    return run(make_config(options), resumed=found)
