"""Rules that say from the next observation whether an episode ends, so that a learned model need not guess it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freerun.core import UserError, import_callable

Termination = Callable[[Tensor], Tensor]
"""[N, next observation] -> [N] of bool: whether the step that led there terminated the episode."""


def never(next_obs: Tensor) -> Tensor:
    return torch.zeros(len(next_obs), dtype=torch.bool, device=next_obs.device)


def inverted_pendulum(next_obs: Tensor) -> Tensor:
    return ~(next_obs[:, 1].abs() <= 0.2)


def hopper(next_obs: Tensor) -> Tensor:
    height, angle, rest = next_obs[:, 0], next_obs[:, 1], next_obs[:, 1:]
    return ~((height > 0.7) & (angle.abs() < 0.2) & (rest.abs() < 100).all(dim=1))


def walker2d(next_obs: Tensor) -> Tensor:
    height, angle = next_obs[:, 0], next_obs[:, 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def ant(next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~((height >= 0.2) & (height <= 1.0) & next_obs.isfinite().all(dim=1))


def humanoid(next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~((height > 1.0) & (height < 2.0))


def rough_drone(next_obs: Tensor) -> Tensor:
    """The drone is too near to the ground beneath it (the middle of the scan) or above the ceiling."""
    # `hover` has one clearance, at 13. The other tasks have 5 × 5 from there on, with the middle at 13 + 12.
    clearance = next_obs[:, 13] if next_obs.shape[1] == 14 else next_obs[:, 25]
    return ~((clearance >= 0.1) & (next_obs[:, 12] >= 0.0))


# The rules of Gymnasium's MuJoCo environments (v5). Comparisons are negated, so that NaN ends an episode.
KNOWN: dict[str, Termination] = {
    "never": never,
    "inverted-pendulum": inverted_pendulum,
    "hopper": hopper,
    "walker2d": walker2d,
    "ant": ant,
    "humanoid": humanoid,
    "rough-drone": rough_drone,
}
LEARNED = "learned"


def find(name: str) -> Termination | None:
    """The rule of this name, or a user's own as module:callable; None where the model has to learn it."""
    if name == LEARNED:
        return None
    if name in KNOWN:
        return KNOWN[name]
    if ":" in name:
        return import_callable(name, "termination")
    raise UserError(
        f"--termination {name!r} is not known: choose {LEARNED}, {', '.join(KNOWN)}, or your own as module:callable"
    )
