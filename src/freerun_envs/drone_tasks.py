"""What RoughDrone's tasks ask for: the constants of their rewards, episodes and observations, for each version.

Version 1 changes the reward of `explore` alone. In version 0 each second costs 0.05 · v² and each metre shows 5 new
cells at most, so that 5 m/s is the best speed and no policy gets more than about 25 (`drone_pilots.most_return`), after
a third of the arena. In version 1 speed costs nothing, so the return is 0.1 for each cell, less for crashes and for
tumbling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from freerun.core import UserError
from freerun_envs.terrain import ARENA_METRES, RELIEF_METRES

PHYSICS_SECONDS = 0.01
"""The time step of the physics."""
DECIMATION = 2
"""The number of physics steps per action."""
STEP_SECONDS = PHYSICS_SECONDS * DECIMATION
MIN_CLEARANCE = 0.1
"""In metres above the ground; a drone that is lower has crashed."""
CEILING = RELIEF_METRES
"""In metres. It is as high as the highest peaks, so drones must fly around them."""

SPEED_COST, RATE_COST = 0.05, 0.01
"""Per second: the weights of the squared speed and the squared angular velocity, as in Isaac Lab's quadcopter."""
GOAL_REWARD, GOAL_METRES = 15.0, 0.8
"""`hover`: 15 · (1 − tanh(distance / 0.8 m)) per second, as in Isaac Lab's quadcopter."""
PROGRESS_REWARD, REACHED_REWARD, REACHED_METRES = 1.0, 5.0, 0.5
"""`waypoint`: 1 for each metre nearer to the goal, and 5 for coming within 0.5 m of it."""
CELL_REWARD = 0.1
"""`explore`: for each cell of 1 m² that is seen for the first time in the episode."""
CRASH_COST = 1.0
"""Subtracted at a crash, except in `hover`, whose reward is Isaac Lab's."""
SIGHT_METRES = 2.5
"""A drone sees the cells whose middle is at most this far away, seen from above."""

NUM_CELLS = round(ARENA_METRES)
"""The number of cells along each side of the arena. A cell is 1 m wide."""
SIGHT_CELLS = math.ceil(SIGHT_METRES)
SEEN_WIDTH = NUM_CELLS + 2 * SIGHT_CELLS
"""The cells along each side with a border, so that a drone at the edge needs no special case."""
SCAN_SPACING, MAP_SPACING = 1.0, 2.5
"""Metres between the points of the clearance grid, and of the map of seen ground."""


@dataclass(frozen=True)
class Task:
    episode_seconds: float
    scan_width: int
    """Points along each side of the clearance grid."""
    map_width: int = 0
    """Points along each side of the map of seen ground."""
    speed_cost: float = SPEED_COST

    @property
    def num_observations(self) -> int:
        # Four vectors and the distance to the ceiling make 13.
        return 13 + self.scan_width**2 + self.map_width**2


_FIRST = {"explore": Task(20.0, 5, 7), "hover": Task(10.0, 1), "waypoint": Task(20.0, 5)}
TASKS = (_FIRST, _FIRST | {"explore": replace(_FIRST["explore"], speed_cost=0.0)})
"""The tasks by name, for version 0 and version 1."""


def find_task(name: str, version: int) -> Task:
    if version not in range(len(TASKS)):
        raise UserError(f"RoughDrone has no version {version}: use {' or '.join(map(str, range(len(TASKS))))}")
    if name not in TASKS[version]:
        raise UserError(f"RoughDrone has no task {name!r}: use {', '.join(TASKS[version])}")
    return TASKS[version][name]
