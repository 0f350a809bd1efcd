"""Isaac Lab's simulator: found, checked and started before anything else imports it. Nothing here imports torch.

Isaac Lab 3 starts what a task's config asks for (`launch_simulation`): Newton needs no app, PhysX needs Isaac Sim's.
Isaac Lab 2 always starts Isaac Sim's app (`AppLauncher`), and its tasks can be imported only then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from freerun.core import UserError

PREFIX = "Isaac-"
ANY_NAME = "isaac:"
"""Before the name of a task that does not begin with Isaac-."""
STAND_INS = {"Isaac-Exploration-Rough-Drone-v0": "freerun/RoughDrone-v0"}
"""Tasks that freerun can simulate itself."""
INSTALL = "install Isaac Lab: `pip install isaaclab` into Python 3.12 (version 3), or version 2 with Isaac Sim"
NUM_MATCHES = 5


@dataclass
class Simulation:
    """The one simulation of this process."""

    task: str
    config: Any
    """The task's own, with what was asked for filled in."""
    runtime: contextlib.ExitStack
    """What version 3 has started for it: Isaac Sim's app, or nothing."""
    is_taken: bool = False
    """Whether its environments were made."""


_simulation: Simulation | None = None
_app: Any = None
"""Isaac Sim's, started by version 2."""


def is_isaac_task(name: Any) -> bool:
    return isinstance(name, str) and name.startswith((PREFIX, ANY_NAME))


def is_installed() -> bool:
    return importlib.util.find_spec("isaaclab") is not None


def resolve(task: str) -> str:
    """The task itself, or freerun's own simulator where it can stand in for an Isaac Lab that is not installed."""
    if is_installed():
        return task
    if task not in STAND_INS:
        raise UserError(f"{task} needs Isaac Lab, which is not installed here: {INSTALL}")
    print(f"Isaac Lab is not installed: {task} is simulated by {STAND_INS[task]}", file=sys.stderr)
    return STAND_INS[task]


def start_app(device: str, headless: bool) -> None:
    """The app of version 2, once. Call it before torch is imported: Isaac Sim wants to come first.

    Version 3 starts what it needs when it knows the task, and minds less.
    """
    global _app
    if _app is not None or not is_installed():
        return
    check_device(device)
    with _explained("Isaac Sim"), _without_arguments():
        app_module = importlib.import_module("isaaclab.app")
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
) -> Simulation:
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
    with _explained(task), _without_arguments():
        config = _config(task, num_envs, device, seed, settings)
        if _app is None:
            runtime.enter_context(importlib.import_module("isaaclab.app").launch_simulation(config, arguments))
    _simulation = Simulation(task, config, runtime)
    atexit.register(stop, 0)
    return _simulation


def is_taken() -> bool:
    """Whether environments were made in this process, so that there can be no others."""
    return _simulation is not None and _simulation.is_taken


def take() -> Simulation:
    """The simulation that was launched, for whoever makes its environments."""
    if _simulation is None:
        raise UserError("no simulation was launched: call freerun.envs.isaac_launch.launch() first")
    if _simulation.is_taken:
        raise UserError(f"{_simulation.task} runs in this process already: Isaac Lab simulates once per process")
    _simulation.is_taken = True
    return _simulation


def stop(exit_code: int) -> None:
    """End the simulator. Call it last: where Isaac Sim's app runs, it ends the process too, with this exit code."""
    global _simulation, _app
    simulation, app, _simulation, _app = _simulation, _app, None, None
    sys.stdout.flush()
    sys.stderr.flush()
    if simulation is not None:
        simulation.runtime.__exit__(SystemExit, SystemExit(exit_code), None)
    if app is not None:
        if exit_code:
            os._exit(exit_code)  # version 2's app ends the process with 0, whatever has happened
        app.close()


def check_device(device: str) -> None:
    """Whether there is such a GPU: asked of the driver, as starting the simulator takes a minute and torch is not to
    be imported yet."""
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
    is_fine = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_fine else 0


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
        config.compute_final_obs = True
    for setting, value in settings.items():
        _set(config, setting, value)
    return config


def _advice(name: str) -> str:
    if name in STAND_INS:
        return f"train on {STAND_INS[name]}, which is freerun's own"
    names = sorted(known for known in gymnasium.registry if known.startswith(PREFIX))
    close = difflib.get_close_matches(name, names, n=NUM_MATCHES, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names)}"


def _set(config: Any, name: str, value: Any) -> None:
    """A field of a config: sim.dt, episode_length_s, …"""
    *path, last = name.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, last):
        raise UserError(f"--env-args {name}: the task's config ({type(config).__name__}) has no such field")
    setattr(owner, last, value)


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
    """What Isaac Lab lacks is the user's to install, and it says so itself; where Isaac Sim is missing, by exiting."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{task}: Isaac Lab cannot be imported as {error}; install what it lacks") from error
    except SystemExit as error:
        raise UserError(f"{task} cannot be simulated here. Isaac Lab says: {error}") from None


@contextlib.contextmanager
def _without_arguments() -> Iterator[None]:
    """Isaac Sim takes the words of the command line for its own."""
    words, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = words
