"""The functions that Python programs call: `freerun.train()`, `freerun.sweep()` and `freerun.resume()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from freerun.adapters.tensor_envs import give
from freerun.core import TensorEnv, UserError
from freerun.experiment import Result, run
from freerun.persistence import trust as trust_check
from freerun.run.resume import newest, nothing_left
from freerun.run.resume import settings_of as settings_of_run
from freerun.run.update_hooks import Callback
from freerun.settings.config import AnyConfig
from freerun.settings.named_code import code_in
from freerun.settings.own_classes import name_own
from freerun.settings.presets import settings_of
from freerun.settings.registry import make_config
from freerun.tools.probe import auto_mode
from freerun.tools.probe.device_choice import choose_device
from freerun.tools.sweep.sweep import Sweep, SweepResult
from freerun.tools.sweep.sweep_options import SweepOptions

logger = logging.getLogger("freerun")


def train(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | TensorEnv | None = None,
    *,
    preset: str | Sequence[str] = (),
    on_update: Callback | None = None,
    **settings: Any,
) -> Result:
    """Train an agent: `train("CartPole-v1", total_steps=50_000, mode="pipes")`. Settings have the names of the flags.

    `algo`, `mode` and the members of `track` and `callback` may be classes of your own. `on_update` is a function that
    is called with every update (docs/callbacks.md).

    The environment may also be a `core.TensorEnv` or an RSL-RL VecEnv that exists already. It is closed at the end. A
    preset that names an environment needs no other: `train(preset="defender")`.
    """
    if env is not None and hasattr(env, "num_envs") and hasattr(env, "device"):
        # Environments that exist already decide their number and their device.
        settings = {"num_envs": env.num_envs, "device": str(env.device), **settings}
        env = give(env)
    return run(_config(env, preset, settings), on_update=on_update)


def _config(env: Any, preset: str | Sequence[str], settings: dict[str, Any]) -> AnyConfig:
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise UserError(_made_already(env))
    names = [preset] if isinstance(preset, str) else preset
    options = {**settings_of(names), **({} if env is None else {"env": env}), **_named(settings)}
    if "env" not in options:
        raise UserError(
            'no environment is named: give one, as in freerun.train("CartPole-v1"), or a preset that has one'
        )
    if auto_mode.is_open(options):
        config = auto_mode.settle(options, lambda mode: make_config(auto_mode.in_mode(options, mode)), given=options)
    else:
        config = make_config(options)
    return choose_device(config)


def _made_already(env: Any) -> str:
    spec = getattr(env, "spec", None)
    name = type(getattr(env, "unwrapped", env)).__name__
    one = f'"{spec.id}"' if spec is not None else name
    return (
        f"freerun.train() was given an environment that is made already ({name}), but every worker makes its own: pass "
        f"its id, its class or a function that makes it, as in freerun.train({one})"
    )


def sweep(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | None = None,
    *,
    vary: Mapping[str, Any],
    preset: str | Sequence[str] = (),
    trials: int | None = None,
    sampler: str = "tpe",
    seeds_per_trial: int = 1,
    at_once: int = 1,
    score: str = "return",
    score_episodes: int = 20,
    cost: str | None = None,
    prune: bool = True,
    **settings: Any,
) -> SweepResult:
    """Search for the settings that train best: `sweep("CartPole-v1", vary={"learning_rate": "1e-5:1e-2:log"})`.

    `vary` has a range as text or a list of values for each setting. Other settings have the names of the flags of
    `freerun train`, and those of this function the names of the flags of `freerun sweep` (docs/sweeps.md).
    """
    options = SweepOptions(
        trials=trials,
        sampler=sampler,  # type: ignore[arg-type]
        seeds_per_trial=seeds_per_trial,
        at_once=at_once,
        score=score,  # type: ignore[arg-type]
        score_episodes=score_episodes,
        cost=cost,  # type: ignore[arg-type]
        prune=prune,
    )
    return Sweep.new(_config(env, preset, settings), vary, options).run()


def resume_sweep(folder: str | Path, *, trust: Sequence[str] = (), **changes: Any) -> SweepResult:
    """Continue a sweep that was stopped or killed: `resume_sweep("runs/sweep-…", trials=80)`."""
    return Sweep.resumed(Path(folder), changes, trust).run()


def resume(
    run_dir: str | Path, *, trust: Sequence[str] = (), on_update: Callback | None = None, **changes: Any
) -> Result:
    """Continue a run that was stopped or killed: `resume("runs/…", total_steps=200_000)`.

    If you did not train the run here, name the code that its folder names again with `trust`.
    """
    path = Path(run_dir)
    found = newest(path)
    changes = _named(changes)
    auto_mode.refuse(changes, "a run goes on in the mode that is named, or in its own")
    before = settings_of_run(found, path)
    # What the folder names needs trust, unless the caller names it now, or names something else in its place.
    code, kept = code_in(before), code_in({**before, **changes, "mode": before["mode"]})
    trust_check.check(code, path, [*trust, *_words(changes), *(name for name in code if name not in kept)])
    config = make_config({**settings_of_run(found, path, changes.get("mode")), **changes})
    if (sentence := nothing_left(config, found)) is not None:
        logger.warning(sentence)
    return run(config, resumed=found, on_update=on_update)


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace classes of the user's own by their names."""
    kinds = {"algo": "algorithm", "mode": "mode"}
    named = {name: name_own(kinds[name], value) if name in kinds else value for name, value in settings.items()}
    for name, kind in {"track": "tracker", "callback": "callback"}.items():
        if isinstance(named.get(name), list | tuple):
            named[name] = tuple(name_own(kind, thing) for thing in named[name])
    return named


def _words(changes: Mapping[str, Any]) -> list[str]:
    """What these settings name, each word by itself."""
    return [str(word) for value in changes.values() for word in (value if isinstance(value, tuple) else [value])]
