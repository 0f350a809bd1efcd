"""Starts Isaac Sim, if a command needs it, before anything else is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freerun.settings.flag_parsing import parse_known


@dataclass(frozen=True)
class _SimulatorFlags:
    """The flags that decide whether and how Isaac Sim is started."""

    task: str | None = None
    device: str = "cpu"
    headless: bool = True
    resume: Path | None = None


def start(words: list[str]) -> str | None:
    """Start Isaac Sim if the words name one of its tasks.

    Return the environment that --task names, or ENV if it is stepped as tensors: the default mode, and with it the set
    of flags, depends on it.
    """
    from freerun.adapters.isaac_launch import is_isaac_task, start_app
    from freerun.adapters.tensor_envs import find_builder

    simulator, _ = parse_known(_SimulatorFlags, words)
    task = simulator.task or next(filter(find_builder, words), None)
    if is_isaac_task(task):
        start_app(simulator.device, simulator.headless)
    elif simulator.resume is not None:
        start_for(simulator.resume)
    return task


def start_for(run_dir: Path) -> None:
    """Start Isaac Sim if a run folder, or one of its checkpoints, needs it."""
    from freerun.adapters.isaac_launch import is_isaac_task, start_app
    from freerun.persistence.files import read_json

    # A checkpoint lies two folders below its run: RUN_DIR/checkpoints/NAME.
    for folder in (run_dir, *list(run_dir.parents)[:2]):
        if (folder / "config.json").is_file():
            config = read_json(folder / "config.json")
            if is_isaac_task(config.get("env")):
                start_app(
                    config.get("device", _SimulatorFlags.device), config.get("headless", _SimulatorFlags.headless)
                )
            return
