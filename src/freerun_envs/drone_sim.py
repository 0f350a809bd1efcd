"""Quadrotors over rough terrain: thousands of them stepped as one batch of torch tensors.

The tasks follow Isaac Lab's quadcopter (isaaclab_tasks/direct/quadcopter), whose reward `hover` takes over.

Observations, in this order (metres, seconds, radians; "body" is the drone's own frame, z up through its rotors):

| numbers | what |
| --- | --- |
| 3 | linear velocity, body |
| 3 | angular velocity, body |
| 3 | the direction of gravity, body: (0, 0, −1) when level |
| 3 | from the drone to its goal, body; in `explore` to the arena's centre, in half widths of the arena |
| 1 | distance to the ceiling |
| 1 or 25 | clearance, the height above the ground: in `hover` beneath the drone, else at 5 × 5 points 1 m apart |
| 49 | only in `explore`: 1 where the ground is seen or outside the arena, at 7 × 7 points 2.5 m apart |

The grids of points turn with the drone's yaw. They run from behind it to ahead, and row by row from right to left.

So `hover` has 14 numbers, `waypoint` 38 and `explore` 87. An action has four numbers in [-1, 1]:
the thrust, from 0 to 1.9 × weight, and the moments about the body's x, y and z axes. There are 50 actions per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import pad

from freerun.core import EnvSpec, Metrics, TensorStep, UserError
from freerun_envs import drone_physics as physics
from freerun_envs.counter_random import keys_from, uniforms
from freerun_envs.drone_physics import Body
from freerun_envs.drone_tasks import (
    CEILING,
    CELL_REWARD,
    CRASH_COST,
    DECIMATION,
    GOAL_METRES,
    GOAL_REWARD,
    MAP_SPACING,
    MIN_CLEARANCE,
    NUM_CELLS,
    PHYSICS_SECONDS,
    PROGRESS_REWARD,
    RATE_COST,
    REACHED_METRES,
    REACHED_REWARD,
    SCAN_SPACING,
    SEEN_WIDTH,
    SIGHT_CELLS,
    SIGHT_METRES,
    STEP_SECONDS,
    Task,
    find_task,
)
from freerun_envs.terrain import HALF_METRES, NUM_STARTS, Terrain, grid_offsets, ground_height, make_terrain

NUM_DRAWS = 12
"""The random numbers that one starting pose takes."""
OBSERVATION_LIMIT = 100.0


class Surroundings(NamedTuple):
    """The points around each drone that its observation describes: x and y of the map, and clearances, [N, points]."""

    map_x: Tensor
    map_y: Tensor
    clearance: Tensor


class Starts(NamedTuple):
    """Precomputed beginnings of episodes: the state and the observation of one start per row of `Terrain.starts`."""

    state: Tensor
    obs: Tensor


class RoughDroneSim:
    """A `core.TensorEnv` of N drones. A drone whose episode has ended begins the next one within the same step.

    A step has no shape that depends on data, never synchronises with the host, and writes its state in place, so it can
    be captured as a CUDA graph. A drone's episodes depend on its own seed alone, not on the device or its neighbours.
    """

    is_capturable = True

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        task: str = "explore",
        seed: int = 0,
        episode_seconds: float | None = None,
        terrain_seed: int = 0,
        num_terrains: int = 16,
        autoreset: bool = True,
        stagger: bool = False,
        version: int = 0,
    ):
        """`stagger` lets the first episodes begin with random step counts, so that they do not all time out at once."""
        self.task, self._task = task, find_task(task, version)
        self.num_envs, self.device, self.autoreset = num_envs, _find_device(device), autoreset
        self._stagger, self._seed = stagger, seed
        seconds = self._task.episode_seconds if episode_seconds is None else episode_seconds
        self.max_episode_steps = round(seconds / STEP_SECONDS)
        if num_envs < 1 or num_terrains < 1 or self.max_episode_steps < 1:
            raise UserError("RoughDrone needs num_envs and num_terrains of 1 or more and episodes of 0.02 s or more")
        self.spec = _spec(self._task)
        self.speed_cost = self._task.speed_cost
        self.terrain: Terrain = make_terrain(terrain_seed, num_terrains, self.device)

        # One row per drone: position, velocity, attitude, rates and goal, so that a restart is a single copy.
        self._state = self._zeros(torch.float32, 16)
        self.body = Body(*(self._state[:, a:b] for a, b in ((0, 3), (3, 6), (6, 10), (10, 13))))
        self.goal = self._state[:, 13:16]
        """`body` and `goal` are views of the state. Write to them to place a drone elsewhere."""
        self.field = self._zeros(torch.int64)
        """The number of the height field that each drone flies over."""
        self.steps = self._zeros(torch.int64)
        """The steps of each drone's episode so far. May be written to, so that not all episodes end at once."""
        self._key, self._episode, self._num_goals = (self._zeros(torch.int64) for _ in range(3))
        self._seen = self._zeros(torch.int32, SEEN_WIDTH**2 if task == "explore" else 1)
        """The episode in which each cell was last seen. With that, a new episode need not clear the cells."""

        self._frame = physics.airframe(self.device)
        self._draw_columns = torch.arange(NUM_DRAWS, device=self.device)
        self._scan_points = grid_offsets(self._task.scan_width, SCAN_SPACING, self.device)
        self._map_points = grid_offsets(self._task.map_width, MAP_SPACING, self.device)
        self._near_cells = grid_offsets(2 * SIGHT_CELLS + 1, 1.0, self.device)
        self._starts = self._make_starts(terrain_seed)
        self.reset(seed)

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros((self.num_envs, *shape), dtype=dtype, device=self.device)

    # ------------------------------------------------------------------------------------------ episodes

    def reset(self, seed: int | Sequence[int] | None = None) -> Tensor:
        """Begin new episodes with all drones: with one seed for each, one for all, or None to keep the current ones."""
        if seed is not None:
            self._key.copy_(keys_from(seed, self.num_envs))
            self._episode.zero_()
            self._seen.zero_()
        obs = self.begin_whole_episodes()
        if self._stagger:
            # On the CPU, so that a seed staggers the same way on every device.
            generator = torch.Generator().manual_seed(self._seed)
            self.steps.copy_(torch.randint(self.max_episode_steps, (self.num_envs,), generator=generator))
        return obs

    @torch.no_grad()
    def begin_whole_episodes(self) -> Tensor:
        """Begin new episodes with all drones, none of them shortened by `stagger`."""
        all_drones = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return self._restart(all_drones, self._zeros(torch.float32, self._task.num_observations))

    def step(self, action: Tensor) -> TensorStep:
        with torch.no_grad():
            thrust, moment = physics.thrust_and_moment(action.clamp(-1.0, 1.0))
            body, distance_before = self.body, self._goal_distance()
            for _ in range(DECIMATION):
                body = physics.advance(body, thrust, moment, self._frame, PHYSICS_SECONDS)
            self._state.copy_(torch.cat([*body, self.goal], 1))
            self.steps += 1

            around = self._look_around(self.body, self.field)
            terminated = self._has_crashed(around)
            truncated = (self.steps >= self.max_episode_steps) & ~terminated
            reward = self._reward(distance_before, terminated)
            final_obs = self._observe(self.body, self.goal, around, self._seen_at(around))
            obs = self._restart(terminated | truncated, final_obs) if self.autoreset else final_obs
            return TensorStep(obs, final_obs, reward, terminated, truncated)

    def _restart(self, ended: Tensor, obs: Tensor) -> Tensor:
        """Begin a new episode where one has ended; return the observations, which are unchanged elsewhere.

        All rows are computed and the right ones selected: indexing by `ended` would give shapes that depend on data."""
        self._episode += ended
        number = (uniforms(self._key, self._episode, self._draw_columns[:1])[:, 0] * len(self._starts.obs)).long()
        self._state.copy_(torch.where(ended[:, None], self._starts.state[number], self._state))
        # Starts are ordered by height field, NUM_STARTS for each.
        self.field.copy_(torch.where(ended, number // NUM_STARTS, self.field))
        self.steps.masked_fill_(ended, 0)
        self._num_goals.masked_fill_(ended, 0)
        if self.task == "explore":
            self._see()
        return torch.where(ended[:, None], self._starts.obs[number], obs)

    def _make_starts(self, seed: int) -> Starts:
        """A pose and a goal above each start of the terrain: 1 to 1.5 m high, any yaw, almost level, almost at rest."""
        ground = self.terrain.starts
        numbers = torch.arange(len(ground), device=self.device)
        field = numbers // NUM_STARTS
        draw = uniforms(keys_from(seed, len(ground)).to(self.device), torch.zeros_like(numbers), self._draw_columns)
        centred = 2.0 * draw - 1.0
        position = torch.cat([ground[:, :2], ground[:, 2:] + 1.0 + 0.5 * draw[:, 0:1]], 1)
        yaw = pad(math.pi * centred[:, 1:2], (2, 0))  # the vector (0, 0, yaw); below, (roll, pitch, 0)
        attitude = physics.multiply(physics.rotation_by(yaw), physics.rotation_by(pad(0.1 * centred[:, 2:4], (0, 1))))
        body = Body(position, 0.3 * centred[:, 4:7], attitude, 0.3 * centred[:, 7:10])
        if self.task == "explore":
            goal = torch.zeros_like(position)
        elif self.task == "waypoint":
            goal = self._place_goals(field, draw[:, 10:12])
        else:
            goal = position + self._frame.up  # `hover`: 1 m above the start
        around = self._look_around(body, field)
        column, row = _cells(around.map_x, around.map_y)
        is_seen = _is_in_sight(position, column, row) | ~_is_inside(column, row)
        return Starts(torch.cat([*body, goal], 1), self._observe(body, goal, around, is_seen))

    def _place_goals(self, field: Tensor, draw: Tensor) -> Tensor:
        """A goal 1 to 2 m above a random start of the same field."""
        ground = self.terrain.starts[field * NUM_STARTS + (draw[:, 0] * NUM_STARTS).long()]
        return torch.cat([ground[:, :2], ground[:, 2:] + 1.0 + draw[:, 1:2]], 1)

    # ------------------------------------------------------------------------------------------ one step

    def _has_crashed(self, around: Surroundings) -> Tensor:
        beneath = around.clearance[:, self._task.scan_width**2 // 2]  # the middle of the grid
        is_outside = (self.body.position[:, :2].abs() > HALF_METRES).any(1)
        return (beneath < MIN_CLEARANCE) | (self.body.position[:, 2] > CEILING) | is_outside

    def _reward(self, distance_before: Tensor, crashed: Tensor) -> Tensor:
        """The reward of this step. It also marks the cells that are seen, and moves the goals that were reached."""
        speed, rate = self.body.velocity.square().sum(1), self.body.rates.square().sum(1)
        reward = -STEP_SECONDS * (self._task.speed_cost * speed + RATE_COST * rate)
        if self.task == "explore":
            return reward + CELL_REWARD * self._see() - CRASH_COST * crashed
        distance = self._goal_distance()
        if self.task == "hover":
            return reward + STEP_SECONDS * GOAL_REWARD * (1.0 - torch.tanh(distance / GOAL_METRES))
        reached = (distance < REACHED_METRES) & ~crashed
        self._num_goals += reached
        # A counter that no start uses: the episode in the lower 32 bits, the number of its goal in the upper ones.
        draw = uniforms(self._key, self._episode + (self._num_goals << 32), self._draw_columns[:2])
        self.goal.copy_(torch.where(reached[:, None], self._place_goals(self.field, draw), self.goal))
        gained = PROGRESS_REWARD * (distance_before - distance) + REACHED_REWARD * reached
        return reward + gained - CRASH_COST * crashed

    def _goal_distance(self) -> Tensor:
        distance: Tensor = torch.linalg.vector_norm(self.goal - self.body.position, dim=1)
        return distance

    def _see(self) -> Tensor:
        """Mark the cells in sight as seen; return how many of them are new, [N]."""
        centre_column, centre_row = _cells(self.body.position[:, 0:1], self.body.position[:, 1:2])
        # A drone beyond the edge looks from the edge: no cell may lie outside the border of `_seen`.
        column = centre_column.clamp(0, NUM_CELLS - 1) + self._near_cells[0]
        row = centre_row.clamp(0, NUM_CELLS - 1) + self._near_cells[1]
        in_sight = _is_in_sight(self.body.position, column, row) & _is_inside(column, row)
        cell = _cell_number(column, row)
        before, now = self._seen.gather(1, cell), self._episode.int()[:, None]
        self._seen.scatter_(1, cell, torch.where(in_sight, now, before))
        return (in_sight & (before != now)).sum(1)

    def _look_around(self, body: Body, field: Tensor) -> Surroundings:
        """The grids of points around each drone, turned by its yaw: (x, y) = position + R(yaw) * (ahead, left)."""
        yaw = physics.heading(body.attitude)[:, None]
        cos, sin = yaw.cos(), yaw.sin()
        (x, y), (map_x, map_y) = (
            (body.position[:, 0:1] + cos * ahead - sin * left, body.position[:, 1:2] + sin * ahead + cos * left)
            for ahead, left in (self._scan_points, self._map_points)
        )
        ground = ground_height(self.terrain, field[:, None], x, y)
        return Surroundings(map_x, map_y, body.position[:, 2:3] - ground)

    def observe(self) -> Tensor:
        """The observations of the current state, for a caller that has written to `body` or `goal`."""
        around = self._look_around(self.body, self.field)
        return self._observe(self.body, self.goal, around, self._seen_at(around))

    def _seen_at(self, around: Surroundings) -> Tensor | None:
        """Whether the ground at each point of the map was seen in this episode or lies outside the arena."""
        if self.task != "explore":
            return None
        column, row = _cells(around.map_x, around.map_y)
        edge = -SIGHT_CELLS, NUM_CELLS + SIGHT_CELLS - 1
        cell = _cell_number(column.clamp(*edge), row.clamp(*edge))
        return (self._seen.gather(1, cell) == self._episode[:, None]) | ~_is_inside(column, row)

    def _observe(self, body: Body, goal: Tensor, around: Surroundings, is_seen: Tensor | None) -> Tensor:
        to_goal = goal - body.position
        if self.task == "explore":
            to_goal = to_goal / HALF_METRES
        down = -self._frame.up.expand_as(to_goal)
        # All vectors of the world's frame are turned into the body's in one call.
        vectors = physics.rotate_back(body.attitude[:, None], torch.stack([body.velocity, down, to_goal], 1))
        velocity, down, to_goal = vectors.unbind(1)
        parts = [velocity, body.rates, down, to_goal, CEILING - body.position[:, 2:3], around.clearance]
        return torch.cat(parts if is_seen is None else [*parts, is_seen.float()], 1)

    def metrics(self) -> Metrics:
        """This simulator logs nothing about itself."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""

    def seen_share(self) -> Tensor:
        """`explore`: the share of the arena's cells that each drone has seen in this episode, [N]."""
        if self.task != "explore":
            return self._zeros(torch.float32)
        return (self._seen == self._episode[:, None]).sum(1) / NUM_CELLS**2

    def seen_cells(self, env: int) -> Tensor:
        """`explore`: whether each cell of 1 m² was seen in this episode of that drone, [y, x]."""
        inner = slice(SIGHT_CELLS, SIGHT_CELLS + NUM_CELLS)
        return (self._seen[env].view(SEEN_WIDTH, SEEN_WIDTH) == self._episode[env])[inner, inner]


def build(name: str, num_envs: int, device: str, seed: int, task: str = "explore", **more: Any) -> RoughDroneSim:
    """The builder for the modes that step it as tensors; `more` are arguments of RoughDroneSim."""
    version = int(name.rpartition("-v")[2])
    try:
        return RoughDroneSim(num_envs, device, task, seed, stagger=True, version=version, **more)
    except TypeError as error:
        raise UserError(f"{name} cannot be built with these --env-args: {error}") from None


def _cells(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Column and row of the cells that contain the points, as floats."""
    return (x + HALF_METRES).floor(), (y + HALF_METRES).floor()


def _is_in_sight(position: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """Whether the middle of each cell is within `SIGHT_METRES`."""
    # The middle of cell (column, row) is at (column + 0.5 - half, row + 0.5 - half) in the arena's coordinates.
    x, y = position[:, 0:1] + (HALF_METRES - 0.5), position[:, 1:2] + (HALF_METRES - 0.5)
    return (column - x).square() + (row - y).square() <= SIGHT_METRES**2


def _cell_number(column: Tensor, row: Tensor) -> Tensor:
    """The place of a cell in a row of `_seen`, which has a border of `SIGHT_CELLS`."""
    return ((row + SIGHT_CELLS) * SEEN_WIDTH + column + SIGHT_CELLS).long()


def _is_inside(column: Tensor, row: Tensor) -> Tensor:
    return (column >= 0) & (column < NUM_CELLS) & (row >= 0) & (row < NUM_CELLS)


def _find_device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device {name!r}: use cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {str(name)!r} needs a GPU that torch can use, and there is none: use --device cpu")
    return device


def _spec(task: Task) -> EnvSpec:
    limit = OBSERVATION_LIMIT
    observations = spaces.Box(-limit, limit, (task.num_observations,), np.float32)
    return EnvSpec(observations, spaces.Box(-1.0, 1.0, (4,), np.float32))
