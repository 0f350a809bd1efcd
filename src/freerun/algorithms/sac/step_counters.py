"""What gradient steps measure, added up on the device until an update ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.core import LearnerGroup, Metrics


class StepCounters:
    """What gradient steps add up on the device, so that no step waits for it."""

    def __init__(self, names: Sequence[str], device: torch.device):
        self._names = names
        self.metric_sums = torch.zeros(len(names) + 1, device=device)
        """The sum of each metric over the gradient steps, and their number."""
        self.num_bad_gradients = torch.zeros(1, device=device)

    def take_means(self, group: LearnerGroup, share: float) -> Metrics:
        """Means over the gradient steps since the last call, and how many gradients were not finite.

        `share` is the share of the rows of a batch that this learner has.
        """
        average_over_learners_(group, self.metric_sums, share)
        *sums, count, num_bad = torch.cat([self.metric_sums, self.num_bad_gradients]).tolist()
        self.metric_sums.zero_()
        self.num_bad_gradients.zero_()
        if not count:
            return {}
        means = {name: total / count for name, total in zip(self._names, sums, strict=True)}
        return {**means, "bad_gradients": num_bad}
