"""What a critic's output means: a value, or a distribution over returns (Bellemare et al. 2017, "C51")."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

Twins = Literal["mean", "min"]
"""What counts of two critics. The smaller value guards against overestimation (TD3); the mean of both learns faster
where batches are large (FastSAC, arXiv 2512.01996)."""


class CriticHead(Protocol):
    """Outputs of both critics are [2, B, outputs]; `bonus` [B] is what the entropy adds to the value of s'."""

    num_outputs: int

    def values(self, output: Tensor) -> Tensor:
        """Q(s, a) of both critics, [2, B]."""
        ...

    def target(self, next_output: Tensor, reward: Tensor, discount: Tensor, bonus: Tensor) -> Tensor:
        """What the critics are to learn: what the target critics say at s', moved by r + discount * (. + bonus)."""
        ...

    def target_value(self, target: Tensor) -> Tensor:
        """The value [B] of what `target` has returned."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each critic on each row, [2, B]."""
        ...


def of_both(values: Tensor, twins: Twins) -> Tensor:
    """One value [B] from those of both critics, [2, B]."""
    return values.mean(dim=0) if twins == "mean" else values.amin(dim=0)


class ScalarHead:
    """The output is the value, and the loss 0.5 * (Q - y)^2."""

    num_outputs = 1

    def __init__(self, twins: Twins):
        self._twins = twins

    def values(self, output: Tensor) -> Tensor:
        return output.squeeze(-1)

    def target(self, next_output: Tensor, reward: Tensor, discount: Tensor, bonus: Tensor) -> Tensor:
        # y = r + discount * (Q(s', a') + bonus)
        return reward + discount * (of_both(self.values(next_output), self._twins) + bonus)

    def target_value(self, target: Tensor) -> Tensor:
        return target

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (self.values(output) - target).square()


class DistributionHead:
    """The output is the logits of `num_atoms` returns, evenly spaced between `lowest` and `highest`."""

    def __init__(self, twins: Twins, lowest: float, highest: float, num_atoms: int, device: torch.device):
        self._twins = twins
        self.num_outputs = num_atoms
        self.support = torch.linspace(lowest, highest, num_atoms, device=device)
        self._lowest, self._highest = lowest, highest

    def values(self, output: Tensor) -> Tensor:
        # Q = sum_i p_i z_i
        return (output.softmax(dim=-1) * self.support).sum(dim=-1)

    def target(self, next_output: Tensor, reward: Tensor, discount: Tensor, bonus: Tensor) -> Tensor:
        probability = next_output.softmax(dim=-1)
        if self._twins == "mean":
            chosen = probability.mean(dim=0)
        else:
            values = (probability * self.support).sum(dim=-1)
            chosen = torch.where((values[0] <= values[1])[:, None], probability[0], probability[1])
        # Each return z_i at s' becomes r + discount * (z_i + bonus).
        return self.project(chosen, reward[:, None] + discount[:, None] * (self.support + bonus[:, None]))

    def project(self, probability: Tensor, returns: Tensor) -> Tensor:
        """Share the probability of each return, [B, atoms], among the two atoms of the support next to it."""
        num_atoms = self.num_outputs
        spacing = (self._highest - self._lowest) / (num_atoms - 1)
        place = ((returns - self._lowest) / spacing).clamp(0, num_atoms - 1)
        below = place.floor()
        above_share = place - below
        index = below.long()
        projected = torch.zeros_like(probability).scatter_add_(1, index, probability * (1 - above_share))
        # At the last atom the share above is 0, so it does not matter where it goes.
        return projected.scatter_add_(1, (index + 1).clamp(max=num_atoms - 1), probability * above_share)

    def target_value(self, target: Tensor) -> Tensor:
        return (target * self.support).sum(dim=-1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        # The cross-entropy -sum_i y_i log p_i
        return -(target * output.log_softmax(dim=-1)).sum(dim=-1)
