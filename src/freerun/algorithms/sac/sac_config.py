"""The settings of SAC."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.algorithms.sac.off_policy_config import OffPolicyConfig
from freerun.core import UserError


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """SAC: what it learns from and how."""

    # Batch size, learning rate, gamma, tau and networks are those of Haarnoja et al. 2018b (appendix D).
    target_entropy: float | None = None
    """What the temperature aims for (minus the number of actions if not given)."""
    initial_temperature: float = 1.0
    """The weight of the policy's entropy, at first. Lower it for rewards far below 1 per step, such as Isaac Lab's,
    which are multiplied by the time of a step: 0.01 suits those (docs/isaac.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_temperature <= 0:
            raise UserError(f"--initial-temperature must be above 0, not {self.initial_temperature:g}")
