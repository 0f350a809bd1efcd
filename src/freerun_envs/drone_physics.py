"""The dynamics of a quadrotor as a rigid body, as pure functions on [N, ...] tensors.

A thrust along the body's z axis and a moment about each of its axes act on the body, with linear drag on both. The
Newton-Euler equations of a quadrotor are derived for example in Beard, "Quadrotor Dynamics and Control" (2008).

Each step turns the body by an exact rotation, and carries the angular momentum along by the same rotation. So flight
without moments keeps the momentum in the world's frame up to rounding, and the energy to second order in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GRAVITY = 9.81  # m/s²
MASS = 0.25
"""In kg: a quadrotor of the size of a hand. Mass and inertia are chosen to fit the largest moment below."""
INERTIA = (5e-4, 5e-4, 1e-3)
"""In kg·m², about the body's x, y and z axes, which are its principal axes."""
THRUST_TO_WEIGHT = 1.9
"""The largest thrust, as a multiple of the weight. This and the largest moment are those of Isaac Lab's quadcopter task
(isaaclab_tasks/direct/quadcopter)."""
MAX_MOMENT = 0.01
"""In N·m about each axis. By moment / inertia, that is 20 rad/s² of roll and pitch and 10 rad/s² of yaw."""
DRAG = 0.05
"""In N per m/s. A speed halves in ln 2 · MASS / DRAG = 3.5 s."""
ANGULAR_DRAG = 5e-4
"""In N·m per rad/s. By ln 2 · inertia / drag, roll and pitch rates halve in 0.7 s and yaw rates in 1.4 s."""
HOVER_ACTION = (2 / THRUST_TO_WEIGHT - 1, 0.0, 0.0, 0.0)
"""The action whose thrust equals the weight, without moments."""


class Body(NamedTuple):
    """The state of N bodies: position (m) and velocity (m/s) in the world's frame, attitude as a unit quaternion
    (w, x, y, z) from the body's frame to the world's, rates (rad/s) in the body's frame."""

    position: Tensor
    velocity: Tensor
    attitude: Tensor
    rates: Tensor


class Airframe(NamedTuple):
    """The constants of a quadrotor, on the device of the bodies."""

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
    """Thrust in N [N, 1] and moments in N·m [N, 3] from actions in [-1, 1]."""
    # Thrust: (a_0 + 1) / 2 * thrust_to_weight * m * g
    thrust = (action[:, :1] + 1.0) * (0.5 * THRUST_TO_WEIGHT * MASS * GRAVITY)
    return thrust, action[:, 1:] * MAX_MOMENT


def advance(body: Body, thrust: Tensor, moment: Tensor, frame: Airframe, seconds: float) -> Body:
    """One step of semi-implicit Euler: first the new velocities, then the position and attitude that they lead to."""
    # Newton: m * dv/dt = R(q) * (0, 0, thrust) - drag * v + m * (0, 0, -g)
    push = rotate(body.attitude, frame.up) * (thrust / MASS) - body.velocity * (frame.drag / MASS)
    velocity = body.velocity + (push + frame.gravity) * seconds
    position = body.position + velocity * seconds

    # Angular momentum in the body's frame, L = I * omega, after the moments and the drag of this step.
    momentum = body.rates * (frame.inertia - frame.angular_drag * seconds) + moment * seconds
    rates = momentum * frame.inverse_inertia
    # Euler's equation of a free body, dL/dt = L × omega, gives the rates in the middle of the step. They turn the body.
    middle = rates + torch.linalg.cross(momentum, rates) * (frame.inverse_inertia * (0.5 * seconds))
    turn = rotation_by(middle * seconds)
    attitude = torch.nn.functional.normalize(multiply(body.attitude, turn), dim=-1)
    # In the world's frame L does not change while the body turns, so in the body's frame it turns the other way.
    return Body(position, velocity, attitude, rotate_back(turn, momentum) * frame.inverse_inertia)


# ---------------------------------------------------------------------------------------------- quaternions


def multiply(first: Tensor, second: Tensor) -> Tensor:
    """The quaternion product: the rotation `first`, followed by `second`, which is given in the frame of `first`."""
    # (w1, v1) * (w2, v2) = (w1 * w2 - v1 · v2, w1 * v2 + w2 * v1 + v1 × v2)
    w1, v1, w2, v2 = first[..., :1], first[..., 1:], second[..., :1], second[..., 1:]
    scalar = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    return torch.cat([scalar, w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)], -1)


def rotate(attitude: Tensor, vector: Tensor) -> Tensor:
    """Turn a vector from the body's frame into the world's."""
    # q * v * q^-1 without the products by zero: v + w * t + a × t, where q = (w, a) and t = 2 * a × v
    axis = attitude[..., 1:]
    twice = 2.0 * torch.linalg.cross(axis, vector.expand_as(axis))
    turned: Tensor = vector + attitude[..., :1] * twice + torch.linalg.cross(axis, twice)
    return turned


def rotate_back(attitude: Tensor, vector: Tensor) -> Tensor:
    """Turn a vector from the world's frame into the body's: `rotate` with the conjugate (w, -a)."""
    axis = attitude[..., 1:].expand_as(vector)
    twice = 2.0 * torch.linalg.cross(axis, vector)
    turned: Tensor = vector - attitude[..., :1] * twice + torch.linalg.cross(axis, twice)
    return turned


def rotation_by(angles: Tensor) -> Tensor:
    """The quaternion of a turn about the direction of `angles` by its length, in radians."""
    # (cos(|a| / 2), a / |a| * sin(|a| / 2)). torch.sinc(x) is sin(pi * x) / (pi * x) and 1 at x = 0, so that no turn at
    # all needs no special case.
    half = 0.5 * torch.linalg.vector_norm(angles, dim=-1, keepdim=True)
    return torch.cat([half.cos(), 0.5 * angles * torch.sinc(half / torch.pi)], -1)


def heading(attitude: Tensor) -> Tensor:
    """The yaw angle [N] in radians; 0 where the body's x axis points straight up or down."""
    w, x, y, z = attitude.unbind(-1)
    return torch.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
