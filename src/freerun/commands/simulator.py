"""Isaac Sim must be there before anything else is imported: what the words of a command say of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freerun.parsing import parse_known


@dataclass(frozen=True)
class _Simulator:
    """What must be known before anything is imported."""

    task: str | None = None
    device: str = "cpu"
    headless: bool = True
    resume: Path | None = None


def start(words: list[str]) -> str | None:
    """Isaac Sim comes first, if it is to come at all; what was named as --task, or as ENV if that is a simulator's."""
    from freerun.envs.isaac_launch import is_isaac_task, start_app
    from freerun.envs.tensors import is_only_tensors

    simulator, _ = parse_known(_Simulator, words)
    task = simulator.task or next(filter(is_only_tensors, words), None)
    if is_isaac_task(task):
        start_app(simulator.device, simulator.headless)
    elif simulator.resume is not None:
        start_for(simulator.resume)
    return task


def start_for(run_dir: Path) -> None:
    """The same for a run that is there already, or for one of its checkpoints."""
    from freerun.envs.isaac_launch import is_isaac_task, start_app
    from freerun.persistence.files import read_json

    for folder in (run_dir, *list(run_dir.parents)[:2]):
        if (folder / "config.json").is_file():
            config = read_json(folder / "config.json")
            if is_isaac_task(config.get("env")):
                start_app(config.get("device", _Simulator.device), config.get("headless", _Simulator.headless))
            return
