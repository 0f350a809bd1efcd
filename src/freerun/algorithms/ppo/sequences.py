"""PPO with a memory: rows of an update that follow one another, and the gradient steps on sequences of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import JoinedRows
from freerun.algorithms.policies.recurrent_networks import RecurrentActorCritic
from freerun.algorithms.ppo.gradient_steps import AutogradSteps
from freerun.algorithms.ppo.objective import ppo_losses
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import AnySegment, Array, FloatArray, LearnerGroup, Segment, TensorSegment


class Stretches(NamedTuple):
    """What an update holds of each episode without a gap, one entry per stretch, in the order of its boundaries."""

    first: Array
    """The row of the first step. Rows are numbered as in a `FlatBatch`."""
    stride: Array
    """From the row of a step to that of the next one."""
    length: Array
    memory: FloatArray
    """What is remembered before the first step, [stretches, memory_size]."""

    @classmethod
    def of(cls, segments: Sequence[AnySegment], memory_size: int) -> Stretches:
        found, first_row = [], 0
        for ended, memory in _grids(segments):
            num_steps, width = ended.shape
            is_boundary = ended.copy()
            is_boundary[-1:] = True
            step, column = np.nonzero(is_boundary)  # row by row, as `FlatBatch` numbers boundaries
            # A stretch begins after the boundary before it in its column. Sorted by column, that one is next to it.
            order = np.lexsort((step, column))
            begin = np.zeros_like(step)
            has_earlier = column[order][1:] == column[order][:-1]
            begin[order[1:]] = np.where(has_earlier, step[order][:-1] + 1, 0)
            before = np.zeros((len(step), memory_size), np.float32)
            if memory is not None:
                before[begin == 0] = memory[column[begin == 0]]
            found.append(cls(first_row + begin * width + column, np.full_like(step, width), step - begin + 1, before))
            first_row += num_steps * width
        return cls(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def cut(self, start: int, num_steps: int) -> tuple[Array, Array, Array]:
        """The rows [num_steps, stretches] from step `start` on, where there are any, and the places after the last."""
        step = start + np.arange(num_steps)[:, None]
        is_row = step < self.length
        return np.where(is_row, self.first + self.stride * step, 0), is_row, step == self.length


def _grids(segments: Sequence[AnySegment]) -> Iterator[tuple[Array, FloatArray | None]]:
    """Where episodes end [T, B], and what is remembered before the first step, of each part of a `FlatBatch`."""
    tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
    if tensors:  # these stand side by side
        memories = [segment.memory for segment in tensors if segment.memory is not None]
        ended = torch.cat([segment.ended for segment in tensors], dim=1).cpu().numpy()
        yield ended, torch.cat(memories).cpu().numpy() if memories else None
    for segment in segments:
        if isinstance(segment, Segment):
            yield segment.ended, segment.memory


class Sequences:
    """The rows of an update, cut into sequences of consecutive steps of one episode.

    A stretch begins with nothing remembered, or in the middle of an episode with what the worker's policy remembered
    there (`Segment.memory`). It is cut into sequences of `max_steps`. What is remembered at the start of each is
    computed once, with the weights at the start of the update (`remember`), so gradients flow back through at most
    `max_steps` steps. With `burn_in`, it is computed that many steps before the start, and every gradient step goes
    through them anew, with its own weights but without gradients (Kapturowski et al. 2019).
    """

    def __init__(
        self,
        segments: Sequence[AnySegment],
        memory_size: int,
        max_steps: int,
        device: torch.device,
        burn_in: int = 0,
    ):
        stretches = Stretches.of(segments, memory_size)
        self.num_rows = sum(segment.num_steps for segment in segments)
        self._memory = torch.from_numpy(stretches.memory).to(device)
        longest = int(stretches.length.max(initial=0))
        max_steps = min(max_steps, longest + 1)

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)

        self._blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        cuts = []
        starts = range(0, longest + 1, max_steps)
        # A block begins where the memory of its sequences must be known, and ends where the next one begins.
        begins = [max(0, start - burn_in) for start in starts]
        # A stretch is followed by the observation after its last step, whose value the advantages need.
        for start, begin, end in zip(starts, begins, [*begins[1:], longest + 1], strict=True):
            rows, is_row, is_after = stretches.cut(begin, end - begin)
            here = np.flatnonzero(stretches.length >= begin)
            inputs = np.where(is_after, self.num_rows + np.arange(len(stretches.length)), rows)
            self._blocks.append((tensor(here), tensor(inputs[:, here]), tensor((is_row | is_after)[:, here])))
            rows, is_row, _ = stretches.cut(start, max_steps)
            before, is_before, _ = stretches.cut(begin, burn_in)
            cuts.append((rows[:, here], is_row[:, here], before[:, here], (is_before & (start > 0))[:, here]))
        grid, mask, before, is_before = (np.concatenate(parts, axis=1) for parts in zip(*cuts, strict=True))
        # Where a block holds nothing of a stretch but what is before or after it, there is no sequence to learn from.
        kept = np.flatnonzero(mask.any(axis=0))
        self._kept, self._grid, self._mask = tensor(kept), tensor(grid[:, kept]), tensor(mask[:, kept])
        self._before, self._has_before = tensor(before[:, kept]), tensor(is_before[:, kept]).any(dim=0)
        self._lengths = self._mask.sum(dim=0)
        self._sequence_of_row, self._step_of_row = torch.zeros((2, self.num_rows), dtype=torch.int64, device=device)
        steps, numbers = torch.nonzero(self._mask, as_tuple=True)
        self._sequence_of_row[self._grid[self._mask]] = numbers
        self._step_of_row[self._grid[self._mask]] = steps

    @torch.no_grad()
    def remember(self, net: RecurrentActorCritic, obs: Tensor, boundary_obs: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads of the network see of rows and of boundaries, with the weights of now.

        Keeps the rows, and what is remembered at the start of each sequence.
        """
        inputs, memory, starts = torch.cat([obs, boundary_obs]), self._memory.clone(), []
        outputs = inputs.new_zeros((len(inputs), net.memory.hidden_size))
        for numbers, grid, mask in self._blocks:
            starts.append(memory[numbers])
            if not len(numbers):  # other learners have all rows of this update
                continue
            block_outputs, after = net.unroll(inputs[grid], starts[-1])
            outputs[grid[mask]] = block_outputs[mask]
            # Stretches that have ended take a memory of padding along, which nobody uses.
            memory[numbers] = after
        self._obs = obs
        self._starts = torch.cat(starts)[self._kept]
        seen = torch.cat([inputs, outputs], dim=1)
        return seen[: self.num_rows], seen[self.num_rows :]

    def seen(self, net: RecurrentActorCritic, rows: Tensor) -> Tensor:
        """What the heads see of some rows, with gradients: their sequences are unrolled from the start."""
        if not len(rows):
            return self._obs.new_zeros((0, self._obs.shape[1] + net.memory.hidden_size))
        numbers, place = torch.unique(self._sequence_of_row[rows], return_inverse=True)
        num_steps = int(self._lengths[numbers].max())
        memory = self._starts[numbers]
        if len(self._before):
            with torch.no_grad():
                _, after = net.unroll(self._obs[self._before[:, numbers]], memory)
            memory = torch.where(self._has_before[numbers, None], after, memory)
        outputs, _ = net.unroll(self._obs[self._grid[:num_steps, numbers]], memory)
        return torch.cat([self._obs[rows], outputs[self._step_of_row[rows], place]], dim=1)

    def of_all(self, group: LearnerGroup, joined: JoinedRows) -> tuple[Tensor, Tensor]:
        """The rows of the sequences of all learners [T, sequences] in the joined batch, ordered by their first row.

        Shorter ones are padded; the second result is true where they are not.
        """
        grid, mask = joined.joined(self._grid), self._mask
        if group.count > 1:
            parts = group.gather((grid.cpu(), mask.cpu()))
            longest = max(len(part) for part, _ in parts)
            grid, mask = (
                torch.cat([nn.functional.pad(pair[place], (0, 0, 0, longest - len(pair[place]))) for pair in parts], 1)
                for place in range(2)
            )
        order = grid[0].argsort()
        return grid[:, order].to(self._grid.device), mask[:, order].to(self._grid.device)


def draw_sequences(
    grid: Tensor, mask: Tensor, minibatch_size: int, num_epochs: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The rows of every minibatch: whole sequences in a new random order each epoch, of about this many steps."""
    lengths, num_rows = mask.sum(dim=0), int(mask.sum())
    per_epoch = max(1, round(num_rows / minibatch_size))
    for _ in range(num_epochs):
        order = torch.randperm(len(lengths), generator=generator, device=generator.device)
        # With all sequences laid end to end, each belongs to the minibatch into which its middle step falls.
        middle = lengths[order].cumsum(0) - (lengths[order] + 1) // 2
        minibatch = middle * per_epoch // num_rows
        for number in range(per_epoch):
            chosen = order[minibatch == number]
            if len(chosen):
                yield grid[:, chosen][mask[:, chosen]]


class SequenceSteps(AutogradSteps):
    """Gradient steps of a network with a memory: every minibatch consists of whole sequences."""

    sequences: Sequences

    def arrange(
        self, segments: Sequence[AnySegment], config: PPOConfig
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cut the segments of the next update into sequences; return the `Sequences.remember` of this network."""
        size, device = self._recurrent.memory_size, self._weights.device
        self.sequences = Sequences(segments, size, config.sequence_steps, device, config.burn_in)
        return functools.partial(self.sequences.remember, self._recurrent)

    def draws(self, minibatch_size: int, joined: JoinedRows) -> Callable[[int, torch.Generator], Iterator[Tensor]]:
        """Return a function that draws minibatches of about this size, as `Minibatches.draw` does."""
        return functools.partial(draw_sequences, *self.sequences.of_all(self._group, joined), minibatch_size)

    @property
    def _recurrent(self) -> RecurrentActorCritic:
        assert isinstance(self._net, RecurrentActorCritic)
        return self._net

    def seen(self, rows: Tensor) -> Tensor:
        return self.sequences.seen(self._recurrent, rows)

    def compute(self, rows: Tensor, advantage_of_all: Tensor | None) -> Tensor:
        minibatch = self._batch.select(rows)._replace(obs=self.seen(rows))
        self._losses = ppo_losses(self._net, self._config, minibatch, advantage_of_all)
        return self._losses.log_ratio
