"""The replay buffer: a ring of steps on the learner's device, sampled there without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from freerun.core import Acceleration, RingBuffer, UserError, require_positive
from freerun.cuda_graphs import fused

ReplayKind = Literal["uniform", "prioritised", "recency"]
PRIORITY_EPSILON = 1e-6
"""Added to every TD error, so that a step without error is still drawn now and then."""
SMALLEST_PROBABILITY = 1e-12
"""Probabilities are raised to this before they are inverted."""


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
    """Of prioritised replay: how far losses are weighed back against what is drawn too often (beta). This is where it
    begins; it rises linearly over the run to 1, which is all the way."""
    recency_exponent: float = 2.0
    """Of recency replay: 1 draws all alike; with 2, half of what is drawn is from the newest quarter."""

    def __post_init__(self) -> None:
        require_positive(self, "buffer_size", "recency_exponent")
        if not 0 <= self.priority_exponent <= 1 or not 0 <= self.priority_correction <= 1:
            raise UserError("--priority-exponent and --priority-correction must lie between 0 and 1")


class StepBatch(NamedTuple):
    """A batch of N steps, flat."""

    obs: Tensor
    action: Tensor
    """Scaled to [-1, 1]; the number of the choice where actions are discrete."""
    reward: Tensor
    next_obs: Tensor
    terminated: Tensor
    """1 where nothing follows; 0 also at a time limit. With returns over k steps it is 1 - gamma^(k-1): the part by
    which the value of `next_obs` counts less than after one step."""


class ReplaySample(NamedTuple):
    """Steps that were drawn from a buffer."""

    steps: StepBatch
    weight: Tensor
    """The weight of each step in the loss."""
    rows: Tensor
    """Where the steps lie in the buffer."""

    def part(self, mine: slice) -> ReplaySample:
        """Some of the steps with their weights; `rows` stay those of all."""
        steps = StepBatch(*(column[mine] for column in self.steps))
        return ReplaySample(steps, self.weight[mine], self.rows)


class DrawnRows(NamedTuple):
    """A sample before it is split into columns."""

    values: Tensor
    """[N, columns]"""
    weight: Tensor
    rows: Tensor


class ReplayBuffer:
    """The last `capacity` steps. One row holds a whole step, so that drawing a batch takes one gather.

    The number of filled rows is kept on the device too: a captured CUDA graph must draw from what is there when it is
    replayed, not from what was there when it was captured.
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
        self.total = 0
        """Rows that were ever added; row n lies at n % capacity."""
        self._column_sizes = (obs_size, action_size, 1, obs_size, 1)
        self._config = config
        # Not filled with zeros: the machine provides no memory for pages that are never written.
        self.rows = torch.empty((capacity, sum(self._column_sizes)), device=device)
        self.versions = torch.empty(capacity, dtype=torch.int64, device=device)
        self._num_drawable = torch.zeros((), device=device)
        self._newest_row = torch.zeros((), dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._gather = fused(self._gather_rows, acceleration)
        if config.replay == "prioritised":
            self.priorities = torch.zeros(capacity, device=device)
            self.max_priority = torch.ones((), device=device)
            self.beta = torch.tensor(config.priority_correction, device=device)

    def add(self, steps: StepBatch, versions: Tensor) -> None:
        """Append steps; `versions` are those of the weights that chose the actions, or of the model that made them."""
        columns = [part.reshape(len(versions), size) for part, size in zip(steps, self._column_sizes, strict=True)]
        # Of more steps than fit only the newest are stored, and only they count in `total`.
        rows = torch.cat(columns, dim=1)[-self.capacity :]
        versions = versions[-self.capacity :]
        index = (torch.arange(len(rows), device=rows.device) + self.total) % self.capacity
        self.rows[index] = rows
        self.versions[index] = versions
        if self._config.replay == "prioritised":
            # New steps get the highest priority so far, so that each is drawn soon (Schaul et al. 2016, algorithm 1).
            self.priorities[index] = self.max_priority
        self.total += len(rows)
        self.size = min(self.capacity, self.total)
        self._newest_row.fill_(self.total % self.capacity - 1)
        self.draw_from_newest(self.size)

    def draw_from_newest(self, num_rows: int) -> None:
        """From now on draw only from this many of the newest rows."""
        self._num_drawable.fill_(min(self.size, num_rows))

    def sample(self, num_rows: int) -> ReplaySample:
        """Draw rows with replacement. Nothing here waits for the device."""
        values, weight, rows = self.draw(num_rows)
        return ReplaySample(self.split(values), weight, rows)

    def draw(self, num_rows: int) -> DrawnRows:
        """As `sample`, for rows that are to be joined with others: a copy each costs less than one for every column."""
        if num_rows and not self.size:
            raise RuntimeError("the buffer is empty: there is no step to draw")
        # A float32 takes only 2^24 values in [0, 1): rows whose probability is smaller would not be drawn.
        dtype = torch.float64 if self._config.replay == "prioritised" else torch.float32
        return self._gather(torch.rand(num_rows, generator=self.generator, device=self.rows.device, dtype=dtype))

    def _gather_rows(self, uniform: Tensor) -> DrawnRows:
        if self._config.replay == "prioritised" and len(uniform):
            index, weight = self._sample_by_priority(uniform)
        else:
            if self._config.replay == "recency":
                # age / n = u^k, so P(age / n <= x) = x^(1/k): with k = 2, half are from the newest quarter.
                uniform = uniform**self._config.recency_exponent
            # Rounding may give an age of n, which no row has. A row before the first one is at the end of the ring.
            age = (uniform * self._num_drawable).long()
            index = (self._newest_row - torch.minimum(age, self._num_drawable.long() - 1)) % self.capacity
            weight = torch.ones_like(uniform, dtype=torch.float32)
        # index_select takes a third of the time of rows[index] on a CPU.
        return DrawnRows(self.rows.index_select(0, index), weight, index)

    def _sample_by_priority(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Prioritised replay (Schaul et al. 2016): P(i) = p_i / sum_k p_k, with weights that correct for the bias."""
        # Inversion of the cumulative priorities. In float32, adding a low priority to the sum of a million others would
        # not change the sum: that row would never be drawn.
        cumulative = self.priorities.cumsum(0, dtype=torch.float64)
        index = torch.searchsorted(cumulative, uniform * cumulative[-1]).clamp(max=self.capacity - 1)
        # Rounding may push a draw past the last filled row.
        index = torch.minimum(index, self._num_drawable.long() - 1)
        probability = (self.priorities[index] / cumulative[-1]).clamp(min=SMALLEST_PROBABILITY)
        # Importance-sampling weights (section 3.4): w_i = (N * P(i))^-beta / max_j w_j
        weight = (self._num_drawable * probability) ** -self.beta
        return index, weight / weight.max()

    def anneal_beta(self, progress: float) -> None:
        """Raise beta linearly to 1 over the run: early on, values change too fast for the bias to matter."""
        if self._config.replay == "prioritised":
            start = self._config.priority_correction
            # beta = beta_0 + (1 - beta_0) * progress
            self.beta.fill_(start + (1 - start) * progress)

    def update_priorities(self, rows: Tensor, td_error: Tensor) -> None:
        """p_i = (|delta_i| + eps)^alpha, the proportional variant of Schaul et al. 2016."""
        if self._config.replay == "prioritised" and len(rows):
            priority = (td_error.abs() + PRIORITY_EPSILON) ** self._config.priority_exponent
            # One priority that is not finite would make the sum of all so: such a row keeps the one that it had.
            priority = torch.where(priority.isfinite(), priority, self.priorities[rows])
            self.priorities[rows] = priority
            self.max_priority.copy_(torch.maximum(self.max_priority, priority.max()))

    def newest(self, num_rows: int) -> StepBatch:
        """The last rows, oldest first."""
        index = (torch.arange(-num_rows, 0, device=self.rows.device) + self.total) % self.capacity
        return self.split(self.rows[index])

    def split(self, rows: Tensor) -> StepBatch:
        """The columns of whole rows."""
        obs, action, reward, next_obs, terminated = torch.split(rows, list(self._column_sizes), dim=1)
        return StepBatch(obs, action, reward.squeeze(1), next_obs, terminated.squeeze(1))

    def state_dict(self) -> dict[str, Any]:
        ring = RingBuffer({"rows": self.rows, "versions": self.versions}, self.total)
        state: dict[str, Any] = {"ring": ring, "generator": self.generator.get_state()}
        if self._config.replay == "prioritised":
            state |= {"priorities": self.priorities, "highest": self.max_priority}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ring = state["ring"]
        if ring.capacity != self.capacity:
            raise ValueError(f"a replay buffer of {ring.capacity} rows is none of {self.capacity}")
        self.total, self.size = ring.total, ring.total - ring.first
        # A buffer's own rows are in their place already, and torch refuses to copy them there.
        is_own = isinstance(ring, RingBuffer) and ring.columns["rows"] is self.rows
        for first, columns in () if is_own else ring.pieces():
            index = torch.arange(first, first + len(columns["versions"]), device=self.rows.device) % self.capacity
            self.rows[index] = torch.as_tensor(columns["rows"], device=self.rows.device)
            self.versions[index] = torch.as_tensor(columns["versions"], device=self.rows.device)
        if self._config.replay == "prioritised":
            self.priorities.copy_(state["priorities"])
            self.max_priority.copy_(state["highest"])
        self._newest_row.fill_(self.total % self.capacity - 1)
        self.draw_from_newest(self.size)
        self.generator.set_state(state["generator"].cpu())
