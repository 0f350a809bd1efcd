"""Finds, checks and starts Isaac Lab's simulator. It must run before torch is imported, so it does not import torch.

Isaac Lab 3 starts what a task's config asks for (`launch_simulation`): Newton needs no app, PhysX needs Isaac Sim's
app. Isaac Lab 2 always needs Isaac Sim's app (`AppLauncher`), and its tasks can be imported only after that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import difflib
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from freerun.core import UserError

PREFIX = "Isaac-"
ANY_NAME = "isaac:"
"""The prefix for tasks whose own name does not begin with Isaac-."""
BUILT_IN_TASKS = {"Isaac-Exploration-Rough-Drone-v0": "freerun/RoughDrone-v0"}
"""Tasks that freerun can simulate itself, and the environment that does."""
INSTALL = "install Isaac Lab: `pip install isaaclab` into Python 3.12 (version 3), or version 2 with Isaac Sim"
FIRST_START = "the first time on a machine it compiles its kernels, which takes minutes"
"""Said at each start, because Isaac Lab does not say it and later starts take seconds."""
NUM_MATCHES = 5
ASSET_CLIENT = "omni"
"""The package by which Isaac Lab downloads robots and grounds from NVIDIA's server. Isaac Sim brings it."""
ASSETS = "set ISAACSIM_ASSET_ROOT to a folder that has them (docs/isaac.md)"


@dataclass
class IsaacSimulation:
    """The one simulation of this process."""

    task: str
    config: Any
    """The task's own config, with the user's settings filled in."""
    runtime: contextlib.ExitStack
    """What version 3 has started for the task: Isaac Sim's app, or nothing."""
    is_taken: bool = False
    """Whether its environments have been made."""


_simulation: IsaacSimulation | None = None
_app: Any = None
"""Isaac Sim's app, if version 2 has started it."""


def is_isaac_task(name: object) -> bool:
    return isinstance(name, str) and name.startswith((PREFIX, ANY_NAME))


def is_installed() -> bool:
    return importlib.util.find_spec("isaaclab") is not None


def resolve(task: str) -> str:
    """The task itself; or, if Isaac Lab is not installed, the built-in environment that replaces it."""
    if is_installed():
        return task
    if task not in BUILT_IN_TASKS:
        raise UserError(f"{task} needs Isaac Lab, which is not installed here: {INSTALL}")
    print(f"Isaac Lab is not installed: {task} is simulated by {BUILT_IN_TASKS[task]}", file=sys.stderr)
    return BUILT_IN_TASKS[task]


def start_app(device: str, headless: bool) -> None:
    """Start the app of version 2, once. Isaac Sim must be loaded before torch, so call this before torch is imported.

    For version 3 this does nothing: `launch` starts what the task needs, and torch may be imported before.
    """
    global _app
    if _app is not None or not is_installed():
        return
    check_device(device)
    with explained("Isaac Sim"), _without_arguments():
        app_module = importlib.import_module("isaaclab.app")
        # Version 3 has this function instead of the class below.
        if not hasattr(app_module, "launch_simulation"):
            _app = app_module.AppLauncher(headless=headless, device=device).app
            atexit.register(stop, 0)


def launch(
    task: str,
    num_envs: int | None = None,
    device: str = "cuda:0",
    headless: bool = True,
    seed: int = 0,
    **settings: Any,
) -> IsaacSimulation:
    """Start the simulator for a task, once per process.

    `settings` are fields of the task's config (episode_length_s, sim.dt, …), and two more: `tasks`, a module of your
    own that registers tasks, and `physics`, an engine of Isaac Lab 3 (newton_mjwarp, physx, …).
    """
    global _simulation
    if _simulation is not None:
        if _simulation.task != task:
            raise UserError(
                f"{_simulation.task} runs in this process already, and Isaac Lab simulates one task per process"
            )
        return _simulation
    if not is_installed():
        raise UserError(f"{task} needs Isaac Lab, which is not installed here: {INSTALL}")
    start_app(device, headless)
    check_device(device)
    arguments = {"device": device, "headless": headless}
    if "physics" in settings:
        arguments["physics"] = settings.pop("physics")
    runtime = contextlib.ExitStack()
    with explained(task), _without_arguments():
        config = _config(task, num_envs, device, seed, settings)
        if _app is None:
            if multiprocessing.parent_process() is None:  # once, however many collectors there are
                print(f"Isaac Lab starts {task}: {FIRST_START}", file=sys.stderr, flush=True)
            runtime.enter_context(importlib.import_module("isaaclab.app").launch_simulation(config, arguments))
    _simulation = IsaacSimulation(task, config, runtime)
    atexit.register(stop, 0)
    return _simulation


def is_taken() -> bool:
    """Whether this process has made its environments. It cannot make others."""
    return _simulation is not None and _simulation.is_taken


def take() -> IsaacSimulation:
    """Hand out the launched simulation to the one caller that makes its environments."""
    if _simulation is None:
        raise UserError("no simulation was launched: call freerun.adapters.isaac_launch.launch() first")
    if _simulation.is_taken:
        raise UserError(f"{_simulation.task} runs in this process already: Isaac Lab simulates once per process")
    _simulation.is_taken = True
    return _simulation


def stop(exit_code: int) -> None:
    """End the simulator. Call it last: if Isaac Sim's app runs, this ends the process too, with this exit code."""
    global _simulation, _app
    simulation, app, _simulation, _app = _simulation, _app, None, None
    sys.stdout.flush()
    sys.stderr.flush()
    if simulation is not None:
        # As if the `with` block of `launch_simulation` were left by this exit: Isaac Lab 3 reads the code from it.
        simulation.runtime.__exit__(SystemExit, SystemExit(exit_code), None)
    if app is not None:
        if exit_code:
            os._exit(exit_code)  # version 2's `close` would always end the process with 0
        app.close()


def check_device(device: str) -> None:
    """Raise UserError if there is no such GPU. This asks the driver directly: starting the simulator only to fail would
    take a minute, and torch must not be imported yet."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"there is no device {device!r}: use cpu, cuda or cuda:0")
    num_gpus = 0 if kind == "cpu" else _num_gpus()
    if kind == "cuda" and int(number or 0) >= num_gpus:
        found = "there is none" if num_gpus == 0 else f"there are {num_gpus}, counted from 0"
        raise UserError(f"--device {device} needs a GPU, and {found}: use --device cpu or another GPU")


def _num_gpus() -> int:
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    succeeded = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0  # 0 is CUDA_SUCCESS
    return count.value if succeeded else 0


def _config(task: str, num_envs: int | None, device: str, seed: int, settings: Mapping[str, Any]) -> Any:
    name, settings = task.removeprefix(ANY_NAME), dict(settings)
    importlib.import_module("isaaclab_tasks")  # registers the tasks
    if "tasks" in settings:
        importlib.import_module(settings.pop("tasks"))
    if name not in gymnasium.registry:
        raise UserError(f"Isaac Lab has no task {name!r} here: {_advice(name)}")
    parse = importlib.import_module("isaaclab_tasks.utils").parse_env_cfg
    config = parse(name, device=device, num_envs=num_envs)
    config.seed = seed
    if hasattr(config, "compute_final_obs"):
        # Asks for the observations from before a reset, which bootstrapping at a truncation needs.
        config.compute_final_obs = True
    for setting, value in settings.items():
        _set(config, setting, value)
    return config


def _advice(name: str) -> str:
    if name in BUILT_IN_TASKS:
        return f"train on {BUILT_IN_TASKS[name]}, which is freerun's own"
    names = sorted(known for known in gymnasium.registry if known.startswith(PREFIX))
    close = difflib.get_close_matches(name, names, n=NUM_MATCHES, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names)}"


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field of a config by its path: sim.dt, episode_length_s, …"""
    *path, last = name.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, last):
        raise UserError(f"--env-args {name}: the task's config ({type(config).__name__}) has no such field")
    setattr(owner, last, value)


@contextlib.contextmanager
def explained(task: str) -> Iterator[None]:
    """Turn Isaac Lab's report of what is missing into a UserError. For Isaac Sim it reports by raising SystemExit."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == ASSET_CLIENT:
            lack = f"its files cannot be downloaded without the package {error.name}: {ASSETS}"
        else:
            lack = f"Isaac Lab cannot be imported as {error}; install what it lacks"
        raise UserError(f"{task}: {lack}") from error
    except FileNotFoundError as error:
        raise UserError(f"{task}: {error}; {ASSETS}") from error
    except SystemExit as error:
        raise UserError(f"{task} cannot be simulated here. Isaac Lab says: {error}") from None


@contextlib.contextmanager
def _without_arguments() -> Iterator[None]:
    """Hide the command line from Isaac Sim, which would parse freerun's arguments as its own."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments
