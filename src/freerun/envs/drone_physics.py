"""A quadrotor as a rigid body: thrust along its own z axis and three moments. Pure functions on [N, ...] tensors.

The body turns by the exact rotation of each step, and its angular momentum is carried along by that same rotation: so
torque-free flight keeps the momentum in the world's frame to rounding, and the energy to second order in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GRAVITY = 9.81
MASS = 0.25
"""Kilograms: a quadrotor that fits a hand. Mass and inertia are such that Isaac's moment of 0.01 N·m suits them."""
INERTIA = (5e-4, 5e-4, 1e-3)
THRUST_TO_WEIGHT = 1.9
MAX_MOMENT = 0.01
"""N·m about each axis: 20 rad/s² of roll and pitch, 10 rad/s² of yaw."""
DRAG = 0.05
"""N per m/s: a speed halves in 3.5 s."""
ANGULAR_DRAG = 5e-4
"""N·m per rad/s: roll and pitch rates halve in 0.7 s, yaw rates in 1.4 s."""
HOVER_ACTION = (2 / THRUST_TO_WEIGHT - 1, 0.0, 0.0, 0.0)
"""Thrust equals weight, no moments."""


class Body(NamedTuple):
    """Position and velocity in the world's frame, attitude as a unit quaternion (w, x, y, z), rates in the body's."""

    position: Tensor
    velocity: Tensor
    attitude: Tensor
    rates: Tensor


class Airframe(NamedTuple):
    """What the dynamics need of a quadrotor, on the device of the bodies."""

    inertia: Tensor
    inverse_inertia: Tensor
    up: Tensor
    gravity: Tensor
    drag: float
    angular_drag: float


def airframe(device: torch.device | str = "cpu", drag: float = DRAG, angular_drag: float = ANGULAR_DRAG) -> Airframe:
    inertia = torch.tensor(INERTIA, device=device)
    return Airframe(
        inertia,
        1.0 / inertia,
        torch.tensor((0.0, 0.0, 1.0), device=device),
        torch.tensor((0.0, 0.0, -GRAVITY), device=device),
        drag,
        angular_drag,
    )


def thrust_and_moment(action: Tensor) -> tuple[Tensor, Tensor]:
    """Actions in [-1, 1] as newtons [N, 1] and newton metres [N, 3]."""
    thrust = (action[:, :1] + 1.0) * (0.5 * THRUST_TO_WEIGHT * MASS * GRAVITY)
    return thrust, action[:, 1:] * MAX_MOMENT


def advance(body: Body, thrust: Tensor, moment: Tensor, frame: Airframe, seconds: float) -> Body:
    """One step of semi-implicit Euler: new velocities first, then the position and attitude they lead to."""
    push = rotate(body.attitude, frame.up) * (thrust / MASS) - body.velocity * (frame.drag / MASS)
    velocity = body.velocity + (push + frame.gravity) * seconds
    position = body.position + velocity * seconds

    momentum = body.rates * (frame.inertia - frame.angular_drag * seconds) + moment * seconds
    rates = momentum * frame.inverse_inertia
    # Euler's equations, dL/dt = L × ω, give the rates half a step later: those turn the body.
    middle = rates + torch.linalg.cross(momentum, rates) * (frame.inverse_inertia * (0.5 * seconds))
    turn = rotation_by(middle * seconds)
    attitude = torch.nn.functional.normalize(multiply(body.attitude, turn), dim=-1)
    return Body(position, velocity, attitude, rotate_back(turn, momentum) * frame.inverse_inertia)


# ---------------------------------------------------------------------------------------------- quaternions


def multiply(first: Tensor, second: Tensor) -> Tensor:
    """The rotation `second`, given in the frame of `first`, after `first`."""
    w1, v1, w2, v2 = first[..., :1], first[..., 1:], second[..., :1], second[..., 1:]
    scalar = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    return torch.cat([scalar, w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)], -1)


def rotate(attitude: Tensor, vector: Tensor) -> Tensor:
    """From the body's frame into the world's."""
    axis = attitude[..., 1:]
    twice = 2.0 * torch.linalg.cross(axis, vector.expand_as(axis))
    turned: Tensor = vector + attitude[..., :1] * twice + torch.linalg.cross(axis, twice)
    return turned


def rotate_back(attitude: Tensor, vector: Tensor) -> Tensor:
    """From the world's frame into the body's."""
    axis = attitude[..., 1:].expand_as(vector)
    twice = 2.0 * torch.linalg.cross(axis, vector)
    turned: Tensor = vector - attitude[..., :1] * twice + torch.linalg.cross(axis, twice)
    return turned


def rotation_by(angles: Tensor) -> Tensor:
    """The quaternion of a turn about the vector `angles` by its length."""
    half = 0.5 * torch.linalg.vector_norm(angles, dim=-1, keepdim=True)
    return torch.cat([half.cos(), 0.5 * angles * torch.sinc(half / torch.pi)], -1)


def heading(attitude: Tensor) -> Tensor:
    """The yaw angle [N]; 0 where the body points straight up or down."""
    w, x, y, z = attitude.unbind(-1)
    return torch.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
