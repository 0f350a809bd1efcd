"""The settings of SAC."""

from __future__ import annotations

from dataclasses import dataclass

from freerun.algorithms.sac.off_policy_config import OffPolicyConfig


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """SAC: what it learns from and how."""

    # Batch size, learning rate, gamma, tau and networks are those of Haarnoja et al. 2018b (appendix D).
    target_entropy: float | None = None
    """What the temperature aims for (minus the number of actions if not given)."""
