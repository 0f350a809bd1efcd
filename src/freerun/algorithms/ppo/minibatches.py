"""How the rows of an update are dealt into minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_FULL_MINIBATCHES = 8
"""From this many minibatches in an epoch on, a captured update leaves out the rows that do not fill another one."""


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of an update with this many rows."""

    num_rows: int
    minibatch_size: int
    """Rows in a minibatch, about."""
    is_captured: bool
    """True if a CUDA graph takes the gradient steps: then minibatches of any update should have the same size."""

    @property
    def rows_per_epoch(self) -> int:
        """The rows that one epoch learns from: all of them, if gradient steps are taken one by one.

        A graph that fits updates of any size has full minibatches alone. What does not fill one, at most an eighth of
        the rows, is left out of the epoch; the next epoch leaves out others, because it has an order of its own.
        """
        if not self.is_captured or self.num_rows < FEWEST_FULL_MINIBATCHES * self.minibatch_size:
            return self.num_rows
        return self.num_rows - self.num_rows % self.minibatch_size

    @property
    def per_epoch(self) -> int:
        # Rounded: 100 rows in minibatches of 64 become two of 50, not one of 64 and a rest of 36.
        return max(1, round(self.rows_per_epoch / self.minibatch_size))

    @property
    def are_even(self) -> bool:
        """True if all have the same number of rows."""
        return self.rows_per_epoch % self.per_epoch == 0

    def draw(self, num_epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The rows of every minibatch, in a new random order each epoch."""
        for _ in range(num_epochs):
            order = torch.randperm(self.num_rows, generator=generator, device=generator.device)
            yield from order[: self.rows_per_epoch].chunk(self.per_epoch)
