"""Scripted pilots for RoughDrone's tasks, to judge a trained policy by, and the most that any policy could get.

They are batched on tensors like the simulator. Pilots may look at the simulator's state (position, velocity, attitude
and the ground), of which a policy sees only what the observation holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from freerun_envs import drone_physics as physics
from freerun_envs.drone_physics import GRAVITY, MASS, THRUST_TO_WEIGHT
from freerun_envs.drone_sim import RoughDroneSim
from freerun_envs.drone_tasks import (
    CEILING,
    CELL_REWARD,
    GOAL_METRES,
    GOAL_REWARD,
    NUM_CELLS,
    PROGRESS_REWARD,
    REACHED_METRES,
    REACHED_REWARD,
    SIGHT_METRES,
    STEP_SECONDS,
)
from freerun_envs.terrain import HALF_METRES, NUM_STARTS, ground_height

Pilot = Callable[[RoughDroneSim], Tensor]
"""A function of the simulator that returns the actions [N, 4] of all drones. It may remember earlier calls."""

LANE_METRES = 2 * SIGHT_METRES
"""The distance between neighbouring lanes: each is as wide as a drone sees, so no ground is seen twice."""
TURN_METRES = 2.0
"""A lawn-mower turns to the next corner of its path when it is this near to one."""
CLEARANCE_METRES = 1.0
"""The height above the highest ground of the next second that pilots hold, as far as the ceiling allows."""
CRUISE_HEIGHT = CEILING - 0.4
"""The greatest height that pilots fly at. A lawn-mower stays there: what it sees does not depend on its height."""
PEAK_METRES = CRUISE_HEIGHT - 0.4
"""Ground that is higher is flown around."""
HEADINGS = tuple(sign * 0.3 * step for step in range(8) for sign in (1.0, -1.0))[1:]
"""The turns, in radians, that are tried in this order to find a way around a peak."""
AHEAD_SECONDS = 1.0
NUM_AHEAD = 10
"""Pilots look at the ground of the next second, at this many points."""
SPEED_GAIN, CLIMB_GAIN, HEIGHT_GAIN = 2.5, 6.0, 2.0
"""Per second: acceleration per error of velocity (along the ground, upwards), and climb per error of height."""
BRAKING = 4.0
"""In m/s²: pilots fly no faster than they can brake with this before a corner or the wanted height."""
TILT_GAIN, RATE_GAIN = 90.0, 14.0
"""Angular acceleration per radian of wrong tilt and per rad/s: damped, about as fast as the moments allow."""


class Flights(NamedTuple):
    """What became of one episode of each drone, [N]."""

    returns: Tensor
    num_steps: Tensor
    crashed: Tensor
    seen_share: Tensor
    """The share of the arena's cells that was seen; zeros except in `explore`."""


def fly(sim: RoughDroneSim, pilot: Pilot) -> Flights:
    """Play one episode with each drone of a simulator that does not reset by itself (`autoreset=False`)."""
    returns, num_steps, seen_share = (torch.zeros(sim.num_envs, device=sim.device) for _ in range(3))
    crashed = torch.zeros(sim.num_envs, dtype=torch.bool, device=sim.device)
    flying = ~crashed
    while bool(flying.any()):
        result = sim.step(pilot(sim))
        returns += result.reward * flying
        num_steps += flying
        crashed |= result.terminated & flying
        # A drone that has ended is stepped on with the others, so what it had seen is noted while it flies.
        seen_share = torch.where(flying, sim.seen_share(), seen_share)
        flying &= ~(result.terminated | result.truncated)
    return Flights(returns, num_steps, crashed, seen_share)


# ---------------------------------------------------------------------------------------------- the pilots


class RandomPilot:
    """Draws every action uniformly."""

    def __init__(self, sim: RoughDroneSim, seed: int):
        self._shape, self._device = (sim.num_envs, 4), sim.device
        self._generator = torch.Generator().manual_seed(seed)  # on the CPU, so that a seed is the same everywhere

    def __call__(self, sim: RoughDroneSim) -> Tensor:
        return (2.0 * torch.rand(self._shape, generator=self._generator) - 1.0).to(self._device)


class HoverPilot:
    """Holds a place: the goal in `hover`, elsewhere the place where the episode began."""

    def __init__(self, sim: RoughDroneSim):
        self._place = (sim.goal if sim.task == "hover" else sim.body.position).clone()

    def __call__(self, sim: RoughDroneSim) -> Tensor:
        velocity = 2.0 * (self._place - sim.body.position)
        return steer(sim, velocity[:, :2], velocity[:, 2])


class WaypointPilot:
    """Flies to the goal over the hills and around the peaks that lie between."""

    def __init__(self, sim: RoughDroneSim, speed: float):
        self._speed = torch.full((sim.num_envs,), speed, device=sim.device)

    def __call__(self, sim: RoughDroneSim) -> Tensor:
        to_goal = sim.goal - sim.body.position
        distance = torch.linalg.vector_norm(to_goal[:, :2], dim=1)
        # Slower near the goal, so that it comes down to the goal's height, but never stands still.
        speed = torch.minimum(2.0 * distance + 0.5, self._speed)
        along = normalize(to_goal[:, :2], dim=1) * speed[:, None]
        height = torch.maximum(_ground_ahead(sim, along) + CLEARANCE_METRES, sim.goal[:, 2])
        # It is slower the more it has to climb, so that it climbs before it reaches the slope.
        along = along * (1.0 - 0.6 * (height - sim.body.position[:, 2])).clamp(0.1, 1.0)[:, None]
        return steer(
            sim, _around_peaks(sim, along), _climb_to(sim, torch.where(distance < 1.5, sim.goal[:, 2], height))
        )


class LawnMower:
    """Flies in parallel lanes, at one speed: first straight to the edge, then back and forth over the larger side."""

    def __init__(self, sim: RoughDroneSim, speed: float):
        self._speed = speed
        self._corners = _lane_corners(sim.body.position)
        """The path of each drone, [N, corners, 2]."""
        self._next = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)

    def __call__(self, sim: RoughDroneSim) -> Tensor:
        to_corner = self._to_corner(sim)
        near = torch.linalg.vector_norm(to_corner, dim=1) < TURN_METRES
        self._next = (self._next + near).clamp(max=self._corners.shape[1] - 1)
        to_corner = self._to_corner(sim)
        distance = torch.linalg.vector_norm(to_corner, dim=1)
        # v = sqrt(2 · a · d): what can be braked before the corner, which may be at the edge.
        speed = (2.0 * BRAKING * distance).sqrt().clamp(1.5, self._speed)
        along = normalize(to_corner, dim=1) * speed[:, None]
        height = torch.full_like(distance, CRUISE_HEIGHT)
        # It first climbs, and only then crosses the ground at speed.
        along = along * (1.5 - 0.5 * (height - sim.body.position[:, 2])).clamp(0.1, 1.0)[:, None]
        return steer(sim, _around_peaks(sim, along), _climb_to(sim, height))

    def _to_corner(self, sim: RoughDroneSim) -> Tensor:
        return self._corners[torch.arange(sim.num_envs, device=sim.device), self._next] - sim.body.position[:, :2]


def _lane_corners(start: Tensor) -> Tensor:
    """The corners, [N, corners, 2], of paths from each start [N, 3] along lanes that lie side by side."""
    edge = HALF_METRES - SIGHT_METRES
    # As if all starts had positive coordinates: the larger side is then that of the smaller x.
    sign = torch.where(start[:, None, :2] < 0.0, -1.0, 1.0)
    first = start[:, :1].abs()
    lane = torch.arange(round(2 * HALF_METRES / LANE_METRES), device=start.device)
    num_lanes = ((first + edge) / LANE_METRES).floor() + 1
    # When the larger side is done, the lanes on the other side of the start follow.
    x = torch.where(lane < num_lanes, first - LANE_METRES * lane, first + LANE_METRES * (lane - num_lanes + 1))
    end = torch.where(lane % 2 == 0, edge, -edge).expand_as(x)  # every other lane is flown the other way
    # A lane begins at the height at which the last one ended.
    begin = torch.cat([end[:, :1], end[:, :-1]], 1)
    corners = torch.stack([x, begin, x, end], -1).view(len(start), -1, 2)
    return corners.clamp(-edge, edge) * sign


# ---------------------------------------------------------------------------------------------- flying


def _ground_ahead(sim: RoughDroneSim, along: Tensor) -> Tensor:
    """The height of the highest ground on the way of the next second at these velocities, [..., N] for [..., N, 2]."""
    seconds = torch.linspace(0.0, AHEAD_SECONDS, NUM_AHEAD, device=sim.device)
    # At least 1.5 m ahead, so that a drone that has stopped before a slope still sees it.
    size = torch.linalg.vector_norm(along, dim=-1, keepdim=True).clamp(min=1e-6)
    way = along * (size.clamp(min=1.5) / size)
    x, y = (sim.body.position[:, k : k + 1] + way[..., k : k + 1] * seconds for k in (0, 1))
    height = ground_height(sim.terrain, sim.field[:, None], x, y)
    # Outside is as good as a peak: a drone that gets there has crashed.
    is_outside = torch.maximum(x.abs(), y.abs()) > HALF_METRES - 0.5
    return torch.where(is_outside, CEILING, height).amax(-1)


def _around_peaks(sim: RoughDroneSim, along: Tensor) -> Tensor:
    """These velocities [N, 2], turned as little as it takes to lead to no peak in the next second."""
    angle = torch.tensor(HEADINGS, device=sim.device)[:, None]
    cos, sin = angle.cos(), angle.sin()
    x, y = along[:, 0], along[:, 1]
    turned = torch.stack([cos * x - sin * y, sin * x + cos * y], -1)  # [headings, N, 2]
    # argmax finds the first heading that is free, or heading 0 if none is.
    chosen = (_ground_ahead(sim, turned) < PEAK_METRES).int().argmax(0)
    return turned[chosen, torch.arange(sim.num_envs, device=sim.device)]


def _climb_to(sim: RoughDroneSim, height: Tensor) -> Tensor:
    """The climb, in m/s, that leads to this height or, if it is lower, to `CRUISE_HEIGHT`."""
    error = height.clamp(max=CRUISE_HEIGHT) - sim.body.position[:, 2]
    fastest = (2.0 * BRAKING * error.abs()).sqrt().clamp(max=4.0)
    return torch.maximum(torch.minimum(HEIGHT_GAIN * error, fastest), -fastest)


def steer(sim: RoughDroneSim, along: Tensor, climb: Tensor) -> Tensor:
    """The actions that bring the drones to these velocities along the ground [N, 2] and upwards [N]."""
    body = sim.body
    # The thrust that is wanted, per mass: a + drag / m · v + g. The climb comes first; what is left of the largest
    # thrust (with a little kept back) may tilt the drone, by 50 degrees at most.
    drag = physics.DRAG / MASS * body.velocity
    up = (CLIMB_GAIN * (climb - body.velocity[:, 2]) + drag[:, 2] + GRAVITY).clamp(0.2 * GRAVITY, 1.7 * GRAVITY)
    level = SPEED_GAIN * (along - body.velocity[:, :2]) + drag[:, :2]
    left = ((0.97 * THRUST_TO_WEIGHT * GRAVITY) ** 2 - up.square()).sqrt()
    most = torch.minimum(left, 1.2 * up.clamp(min=0.5 * GRAVITY))
    size = torch.linalg.vector_norm(level, dim=1)
    wanted = torch.cat([level * (most / size.clamp(min=1e-6)).clamp(max=1.0)[:, None], up[:, None]], 1)

    wanted_up = physics.rotate_back(body.attitude, normalize(wanted, dim=1))
    own_up = torch.tensor((0.0, 0.0, 1.0), device=sim.device).expand_as(wanted)
    # Tilting takes a while. Until then, too, the part of the thrust that points upwards shall be the wanted one.
    thrust = up[:, None] / physics.rotate(body.attitude, own_up)[:, 2:].clamp(min=0.4)
    # The axis about which to turn; its length is the sine of the angle.
    turn = torch.linalg.cross(own_up, wanted_up)
    inertia = torch.tensor(physics.INERTIA, device=sim.device)
    moment = inertia * (TILT_GAIN * turn - RATE_GAIN * body.rates)
    return torch.cat([2.0 * thrust / (THRUST_TO_WEIGHT * GRAVITY) - 1.0, moment / physics.MAX_MOMENT], 1).clamp(
        -1.0, 1.0
    )


# ---------------------------------------------------------------------------------------------- the most there is


def most_return(sim: RoughDroneSim) -> float:
    """An upper bound on the mean return of any policy in the task of this simulator, whose episodes have just begun.

    `hover`: the goal is 1 m above the start, and the start's own climb is at most 0.3 m/s. No drone gains height faster
    than with all of its thrust, so at time t it is at least 1 − 0.3 t − ½ · 0.9 g t² away, and afterwards at the goal.

    `waypoint`: a path of L metres brings at most L metres of progress, and at least d − 2 · 0.5 of its metres lie
    between two goals that are d apart, d̄ on average. A path of L metres in T seconds costs at least 0.05 · L² / T. So
    the return is at most k · L − 0.05 · L² / T, where k = 1 + 5 / (d̄ − 1). That is largest at L = k · T / 0.1.

    `explore`: a disc of radius r that moves L metres sweeps 2 · r · L new square metres at most, which hold as many
    cells (up to rounding at the rim). So the return is at most 0.1 · 2 · r · L − cost · L² / T, and never more than
    0.1 for each cell that is not yet seen at the start.

    None of them counts what turning, tilting, tumbling and peaks cost, so they cannot be reached.
    """
    seconds = sim.max_episode_steps * STEP_SECONDS
    if sim.task == "hover":
        time = torch.arange(1, sim.max_episode_steps + 1, dtype=torch.float64) * STEP_SECONDS
        away = (1.0 - 0.3 * time - 0.5 * (THRUST_TO_WEIGHT - 1.0) * GRAVITY * time.square()).clamp(min=0.0)
        return float((STEP_SECONDS * GOAL_REWARD * (1.0 - torch.tanh(away / GOAL_METRES))).sum())
    if sim.task == "waypoint":
        goals = PROGRESS_REWARD + REACHED_REWARD / (_mean_goal_distance(sim) - 2 * REACHED_METRES)
        return _best_path(goals, sim.speed_cost, seconds, math.inf)
    num_unseen = float((1.0 - sim.seen_share()).mean()) * NUM_CELLS**2
    per_metre = CELL_REWARD * 2 * SIGHT_METRES
    return _best_path(per_metre, sim.speed_cost, seconds, CELL_REWARD * num_unseen / per_metre)


def _best_path(per_metre: float, speed_cost: float, seconds: float, longest: float) -> float:
    """The largest value of per_metre · L − speed_cost · L² / seconds for paths L of at most `longest` metres."""
    length = min(longest, per_metre * seconds / (2.0 * speed_cost) if speed_cost > 0.0 else math.inf)
    return per_metre * length - speed_cost * length**2 / seconds


def _mean_goal_distance(sim: RoughDroneSim) -> float:
    """The mean distance between two goals of the same field. Their heights above the ground, 1 to 2 m, hardly count."""
    places = sim.terrain.starts.view(-1, NUM_STARTS, 3)
    return float(torch.cdist(places, places).mean())
