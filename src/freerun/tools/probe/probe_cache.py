"""Keeps measurements for `--mode auto`, in one file per environment, arguments, settings and machine."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium

from freerun.adapters.tensor_envs import GIVEN, find_builder
from freerun.core import UserError, callable_name
from freerun.persistence.files import read_json, write_atomically
from freerun.settings.factories import env_recipe
from freerun.settings.registry import flatten_config
from freerun.telemetry.tracking import TrackingConfig
from freerun.tools.probe.candidates import Search
from freerun.tools.probe.measure import num_cores
from freerun.tools.probe.measurement import AnyMeasurement, Measurement, TensorMeasurement

logger = logging.getLogger("freerun")

FORMAT = 4
"""Raised when the fields of a `Measurement` change, so that older files are not found."""
# A new version of any of these may change how fast an environment, a learner or a mode is.
PACKAGES = ("freerun", "gymnasium", "numpy", "torch", "mujoco", "box2d", "ray")
IGNORED = (
    *(field.name for field in dataclasses.fields(TrackingConfig)),
    "run_dir", "seed", "total_steps", "total_episodes", "quiet", "display", "checkpoint_every", "keep_checkpoints",
    "eval_every", "eval_episodes", "watch", "num_workers", "num_collectors", "max_lag", "mode", "on_nan",
)  # fmt: skip
"""Settings that do not change what is measured."""


def folder() -> Path:
    """Return the folder of all measurements."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "freerun" / "probes"


def find(search: Search) -> AnyMeasurement | None:
    """The measurement that was kept; None if there is none, or none that can be read."""
    path = path_of(search)
    if not path.is_file() or _is_unnamed(search):
        return None
    try:
        kind = TensorMeasurement if search.is_tensors else Measurement
        return kind.from_json(read_json(path)["measurement"])
    except (UserError, KeyError, TypeError, AttributeError, ValueError) as error:
        logger.warning("%s is no probe (%s): measured again", path, error)
        return None


def keep(search: Search, measured: AnyMeasurement) -> None:
    """Keep a measurement. A cache that cannot be written only costs a warning."""
    if _is_unnamed(search):
        return
    path = path_of(search)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, json.dumps({"measurement": measured.to_json()}).encode())
    except OSError as error:
        logger.warning("the probe is not kept: %s", error)


def path_of(search: Search) -> Path:
    """Return where the measurement for these settings is kept.

    The name of the file is a digest, because arguments of an environment may be private.
    """
    text = json.dumps(_key(search), sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _is_unnamed(search: Search) -> bool:
    """True for environments that a Python caller has made: their name does not say what they are."""
    return any(str(config.env).startswith(GIVEN) for config in search.configs.values())


def _key(search: Search) -> dict[str, Any]:
    configs = search.completed()
    config = next(iter(configs.values()))
    # How many environments that are tensors are measured depends on the length of the run.
    builder, total_steps = (find_builder(config.env), config.total_steps) if search.is_tensors else (None, None)
    env, env_args, time_limit = (builder, config.env_args, None) if builder is not None else env_recipe(config)[:3]
    settings = {mode: flatten_config(config) for mode, config in sorted(configs.items())}
    return {
        "format": FORMAT,
        "env": [callable_name(config.env), callable_name(env), env_args, time_limit, _source(env), total_steps],
        "settings": {
            mode: {name: value for name, value in flat.items() if name not in IGNORED}
            for mode, flat in settings.items()
        },
        # What is left open decides which units and which sizes of updates are measured.
        "open": {mode: search.open_settings(mode) for mode in sorted(configs)},
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": [platform.node(), platform.machine(), platform.python_version(), num_cores(), _gpu(config.device)],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.get_device_name(device)


def _source(env: str | Callable[..., Any]) -> list[Any] | None:
    """Time and size of the environment's source file, so that an environment that was changed is probed again."""
    # An id of Gymnasium stands for the callable that it was registered with.
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    target = spec.entry_point if spec is not None else env
    module = callable_name(target).partition(":")[0] if target else ""
    try:
        found = importlib.util.find_spec(module)
        status = Path(found.origin).stat() if found and found.origin else None
    except (ImportError, ValueError, OSError, AttributeError):  # __main__ and the like
        return None
    return [status.st_mtime_ns, status.st_size] if status else None
