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
from freerun.registry import make_config, name_own
from freerun.resuming import newest
from freerun.resuming import settings_of as settings_of_run


def train(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | TensorEnv, *, preset: str | Sequence[str] = (), **settings: Any
) -> Result:
    """Train an agent: `train("CartPole-v1", total_steps=50_000, mode="pipes")`. Settings are the flags' names.

    `algo` and `mode` may be classes of your own.

    The environment may also be a `core.TensorEnv` or an RSL-RL VecEnv that is there already; it is closed at the end.
    """
    if hasattr(env, "num_envs") and hasattr(env, "device"):
        settings = {"num_envs": env.num_envs, "device": str(env.device), **settings}
        env = give(env)
    names = [preset] if isinstance(preset, str) else preset
    options = {**settings_of(names), "env": env, **_named(settings)}
    if auto.is_open(options):
        return run(auto.settle(options, lambda mode: make_config(auto.in_mode(options, mode))))
    return run(make_config(options))


def resume(run_dir: str | Path, *, trust: Sequence[str] = (), **changes: Any) -> Result:
    """Go on with a run that was stopped or killed: `resume("runs/…", total_steps=200_000)`.

    Code that the folder names must have been trained there by you, or be named again with `trust`.
    """
    path = Path(run_dir)
    found = newest(path)
    changes = _named(changes)
    auto.refuse(changes, "a run goes on in the mode that is named, or in its own")
    before = settings_of_run(found, path)
    origin.check({**before, **changes, "mode": before["mode"]}, path, [*trust, *map(str, changes.values())])
    return run(make_config({**settings_of_run(found, path, changes.get("mode")), **changes}), resumed=found)


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Classes of the user's own by their names."""
    kinds = {"algo": "algorithm", "mode": "mode"}
    return {name: name_own(kinds[name], value) if name in kinds else value for name, value in settings.items()}
