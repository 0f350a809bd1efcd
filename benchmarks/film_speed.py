"""How many frames a second `freerun eval --render` makes of a drone: the simulator, the picture and the film together.

A lawn-mower explores for one episode. Of each case, the best of several films counts: other programs on the machine can
only make one slower. Nothing is written but what is printed.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.run.filming import Camera
from freerun_envs.drone_pictures import VIEWS
from freerun_envs.drone_pilots import LawnMower
from freerun_envs.rough_drone import RoughDrone


@dataclass(frozen=True)
class Options:
    films: int = 3
    """Of each view."""
    seed: int = 3
    """Of the episode."""


def actions_of_a_flight(seed: int) -> list[NDArray[np.float32]]:
    """They are found before the clock runs: a pilot takes longer than a policy."""
    drone = RoughDrone(task="explore", version=1)
    drone.reset(seed=seed)
    pilot = LawnMower(drone.sim, 8.0)
    actions, ended = [], False
    while not ended:
        actions.append(pilot(drone.sim)[0].numpy())
        _, _, terminated, truncated, _ = drone.step(actions[-1])
        ended = terminated or truncated
    return actions


def film(view: str, seed: int, actions: list[NDArray[np.float32]]) -> tuple[int, float, float, str]:
    """Frames, seconds by the clock, seconds of this process, and the kind of film."""
    factory = GymnasiumFactory("freerun/RoughDrone-v1", {"task": "explore"})
    with tempfile.TemporaryDirectory() as folder:
        camera = Camera(factory, Path(folder), view)
        wall, cpu = time.perf_counter(), time.process_time()
        camera.env.reset(seed=seed)
        for action in actions:
            camera.env.step(action)
        kind = camera.save().suffix
        return 1 + len(actions), time.perf_counter() - wall, time.process_time() - cpu, kind


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    actions = actions_of_a_flight(options.seed)
    for view in VIEWS:
        found = [film(view, options.seed, actions) for _ in range(options.films)]
        by_clock = max(frames / seconds for frames, seconds, _, _ in found)
        by_process = max(frames / seconds for frames, _, seconds, _ in found)
        frames, _, _, kind = found[0]
        print(f"{view}: {frames} frames as {kind}, {by_clock:.0f} a second ({by_process:.0f} a second of CPU time)")


if __name__ == "__main__":
    main()
