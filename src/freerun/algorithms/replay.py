"""Steps kept for later: a ring of rows on the learner's device, sampled there without asking the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from freerun.capture import fused
from freerun.core import Acceleration, Ring, UserError, require_positive

ReplayKind = Literal["uniform", "prioritised", "recency"]
SMALLEST_PRIORITY = 1e-6


@dataclass(frozen=True)
class ReplayConfig:
    """Which steps to learn from again."""

    replay: ReplayKind = "uniform"
    """How steps are drawn from the buffer: all alike, those with a high TD error more often, or recent ones more
    often."""
    buffer_size: int = 1_000_000
    """Steps that the buffer holds; then new ones take the place of the oldest."""
    priority_exponent: float = 0.6
    """Of prioritised replay: 0 draws all alike, 1 in proportion to the TD error."""
    priority_correction: float = 0.4
    """Of prioritised replay: how far losses are weighed back against what is drawn too often; 1 is all the way."""
    recency_exponent: float = 2.0
    """Of recency replay: 1 draws all alike; with 2, half of what is drawn is from the newest quarter."""

    def __post_init__(self) -> None:
        require_positive(self, "buffer_size", "recency_exponent")
        if not 0 <= self.priority_exponent <= 1 or not 0 <= self.priority_correction <= 1:
            raise UserError("--priority-exponent and --priority-correction must lie between 0 and 1")


class Steps(NamedTuple):
    """A batch of N steps, flat."""

    obs: Tensor
    action: Tensor
    """Scaled to [-1, 1]."""
    reward: Tensor
    next_obs: Tensor
    terminated: Tensor
    """1 where nothing follows; 0 also at a time limit."""


class Draw(NamedTuple):
    """What was drawn: the steps, the weight of each in the loss, and where they lie."""

    steps: Steps
    weight: Tensor
    rows: Tensor


class Replay:
    """The last `capacity` steps. One row holds a whole step, so that drawing a batch takes one gather.

    How much is filled is also kept on the device: a captured CUDA graph draws from what is there when it is replayed.
    """

    def __init__(
        self,
        capacity: int,
        obs_size: int,
        action_size: int,
        config: ReplayConfig,
        seed: int,
        device: torch.device,
        acceleration: Acceleration = "none",
    ):
        self.capacity = capacity
        self.size = 0
        self._sizes = (obs_size, action_size, 1, obs_size, 1)
        self._config = config
        self._total = 0  # rows that ever came; row n lies at n % capacity
        # Not filled with zeros: memory that is never written is never taken from the machine.
        self._rows = torch.empty((capacity, sum(self._sizes)), device=device)
        self.versions = torch.empty(capacity, dtype=torch.int64, device=device)
        self._filled = torch.zeros((), device=device)
        self._newest = torch.zeros((), dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._pick = fused(self._pick_rows, acceleration)
        if config.replay == "prioritised":
            self._priorities = torch.zeros(capacity, device=device)
            self._highest = torch.ones((), device=device)

    def add(self, steps: Steps, versions: Tensor) -> None:
        """Append steps; `versions` are those of the weights that chose the actions, or of the model that made them."""
        rows = torch.cat([part.reshape(len(versions), -1) for part in steps], dim=1)[-self.capacity :]
        versions = versions[-self.capacity :]
        index = (torch.arange(len(rows), device=rows.device) + self._total) % self.capacity
        self._rows[index] = rows
        self.versions[index] = versions
        if self._config.replay == "prioritised":
            self._priorities[index] = self._highest
        self._total += len(rows)
        self.size = min(self.capacity, self._total)
        self.limit(self.size)
        self._newest.fill_(self._total % self.capacity - 1)

    def limit(self, num_rows: int) -> None:
        """Draw from so many of the newest rows only."""
        self._filled.fill_(min(self.size, num_rows))

    def draw(self, num_rows: int) -> Draw:
        """Rows with replacement. Nothing here waits for the device."""
        return self._pick(torch.rand(num_rows, generator=self.generator, device=self._rows.device))

    def _pick_rows(self, chance: Tensor) -> Draw:
        if self._config.replay == "prioritised":
            index, weight = self._by_priority(chance)
        else:
            if self._config.replay == "recency":
                chance = chance**self._config.recency_exponent
            age = (chance * self._filled).long()
            index = (self._newest - torch.minimum(age, self._filled.long() - 1)) % self.capacity
            weight = torch.ones_like(chance)
        return Draw(self._split(self._rows[index]), weight, index)

    def _by_priority(self, chance: Tensor) -> tuple[Tensor, Tensor]:
        """In proportion to the priorities (Schaul et al. 2016), weighed back by (N · probability)^−β."""
        ends = self._priorities.cumsum(0)
        index = torch.searchsorted(ends, chance * ends[-1]).clamp(max=self.capacity - 1)
        # A draw that rounding has pushed past the last filled row.
        index = torch.minimum(index, self._filled.long() - 1)
        share = (self._priorities[index] / ends[-1]).clamp(min=1e-12)
        weight = (self._filled * share) ** -self._config.priority_correction
        return index, weight / weight.max()

    def prioritise(self, index: Tensor, td_error: Tensor) -> None:
        """Note how surprising rows were."""
        if self._config.replay == "prioritised":
            priority = (td_error.abs() + SMALLEST_PRIORITY) ** self._config.priority_exponent
            self._priorities[index] = priority
            self._highest.copy_(torch.maximum(self._highest, priority.max()))

    def newest(self, num_rows: int) -> Steps:
        """The last rows, oldest first."""
        index = (torch.arange(-num_rows, 0, device=self._rows.device) + self._total) % self.capacity
        return self._split(self._rows[index])

    def _split(self, rows: Tensor) -> Steps:
        obs, action, reward, next_obs, terminated = torch.split(rows, list(self._sizes), dim=1)
        return Steps(obs, action, reward.squeeze(1), next_obs, terminated.squeeze(1))

    def state_dict(self) -> dict[str, Any]:
        ring = Ring({"rows": self._rows, "versions": self.versions}, self._total)
        state: dict[str, Any] = {"ring": ring, "generator": self.generator.get_state()}
        if self._config.replay == "prioritised":
            state |= {"priorities": self._priorities, "highest": self._highest}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ring = state["ring"]
        if ring.capacity != self.capacity:
            raise ValueError(f"a replay buffer of {ring.capacity} rows is none of {self.capacity}")
        self._total, self.size = ring.total, ring.total - ring.first
        for first, columns in ring.pieces():
            index = torch.arange(first, first + len(columns["versions"]), device=self._rows.device) % self.capacity
            self._rows[index] = torch.as_tensor(columns["rows"], device=self._rows.device)
            self.versions[index] = torch.as_tensor(columns["versions"], device=self._rows.device)
        if self._config.replay == "prioritised":
            self._priorities.copy_(state["priorities"])
            self._highest.copy_(state["highest"])
        self.limit(self.size)
        self._newest.fill_(self._total % self.capacity - 1)
        self.generator.set_state(state["generator"].cpu())
