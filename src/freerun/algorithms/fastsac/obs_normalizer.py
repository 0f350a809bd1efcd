"""Scales observations on the device by their running moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.algorithms.policies.mlp_actor import NORMALIZED_LIMIT
from freerun.algorithms.policies.running_moments import RunningMoments, needs_normalizing


class ObsNormalizer:
    """Running moments of all observations so far. The buffer keeps what was observed, so old steps follow new moments.

    `mean` and `scale` stay in place: a captured gradient step reads them where they are.
    """

    def __init__(self, space: spaces.Box, device: torch.device, enabled: bool):
        is_normalized = needs_normalizing(space)
        self.enabled = bool(enabled and is_normalized.any())
        self._is_normalized = torch.from_numpy(is_normalized)
        self._moments = RunningMoments((len(is_normalized),))
        self.mean = torch.zeros(len(is_normalized), device=device)
        self.scale = torch.ones(len(is_normalized), device=device)

    def update(self, obs: Tensor) -> None:
        """Add these observations [N, size]."""
        if self.enabled:
            self._moments.update(obs)
            self._refresh()

    def __call__(self, obs: Tensor) -> Tensor:
        """clip((obs - mean) / std); `scale` is 1 / std."""
        if not self.enabled:
            return obs
        return ((obs - self.mean) * self.scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def _refresh(self) -> None:
        mean, scale = (torch.from_numpy(moment) for moment in (self._moments.mean, self._moments.scale))
        self.mean.copy_(torch.where(self._is_normalized, mean, 0.0))
        self.scale.copy_(torch.where(self._is_normalized, scale, 1.0))

    def statistics(self) -> dict[str, Tensor]:
        """What a policy needs, by its names there."""
        return {"obs_mean": self.mean, "obs_scale": self.scale} if self.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        return self._moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments.load_state_dict(dict(state))
        if self.enabled and self._moments.count:
            self._refresh()
