"""PPO with a memory: rows of an update that follow one another, and the gradient steps on sequences of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.policies.recurrent_networks import RecurrentActorCritic
from freerun.algorithms.ppo.gradient_steps import AutogradSteps
from freerun.algorithms.ppo.objective import ppo_losses
from freerun.core import AnySegment, Array, LearnerGroup, Segment, UserError


class Sequences:
    """The rows of an update, cut into sequences of consecutive steps of one episode.

    Rows are numbered as in a `FlatBatch`. A stretch is what a segment holds of one episode. It begins with nothing
    remembered, or in the middle of an episode with what the worker's policy remembered there (`Segment.memory`). It is
    cut into sequences of `max_steps`. What is remembered at the start of each is computed once, with the weights at
    the start of the update (`remember`), so gradients flow back through at most `max_steps` steps.
    """

    def __init__(self, segments: Sequence[Segment], memory_size: int, max_steps: int, device: torch.device):
        self._max_steps = max_steps
        stretches, memories = _stretches(segments, memory_size)
        self.num_rows = sum(segment.num_steps for segment in segments)
        self._memory = torch.from_numpy(np.array(memories, np.float32)).reshape(-1, memory_size).to(device)
        # A stretch is followed by the observation after its last step, whose value the advantages need.
        inputs = [np.append(rows, self.num_rows + boundary) for boundary, rows in enumerate(stretches)]
        self._blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        sequences: list[Array] = []
        for first in range(0, max(map(len, inputs), default=0), max_steps):
            going_on = [number for number, rows in enumerate(inputs) if len(rows) > first]
            cut = [inputs[number][first : first + max_steps] for number in going_on]
            grid, mask = _padded(cut)
            numbers = torch.tensor(going_on)
            self._blocks.append(
                (numbers.to(device), torch.from_numpy(grid).to(device), torch.from_numpy(mask).to(device))
            )
            sequences += [rows[rows < self.num_rows] for rows in cut]
        # Where a block holds nothing of a stretch but the observation after it, there is no sequence to learn from.
        kept = [number for number, rows in enumerate(sequences) if len(rows)]
        self._kept = torch.tensor(kept, dtype=torch.int64, device=device)
        sequences = [sequences[number] for number in kept]
        grid, mask = _padded(sequences)
        self._grid, self._mask = torch.from_numpy(grid).to(device), torch.from_numpy(mask).to(device)
        self._lengths = torch.from_numpy(mask.sum(axis=0)).to(device)
        self._sequence_of_row, self._step_of_row = torch.zeros((2, self.num_rows), dtype=torch.int64, device=device)
        steps, numbers_of = torch.nonzero(self._mask, as_tuple=True)
        self._sequence_of_row[self._grid[self._mask]] = numbers_of
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
            block_outputs, after = net.unroll(inputs[grid], starts[-1])
            outputs[grid[mask]] = block_outputs[mask]
            # Stretches that have ended take a memory of padding along, which nobody uses.
            memory[numbers] = after
        self._obs = obs
        self._starts = torch.cat(starts)[self._kept] if starts else memory
        seen = torch.cat([inputs, outputs], dim=1)
        return seen[: self.num_rows], seen[self.num_rows :]

    def seen(self, net: RecurrentActorCritic, rows: Tensor) -> Tensor:
        """What the heads see of some rows, with gradients: their sequences are unrolled from the start."""
        numbers, place = torch.unique(self._sequence_of_row[rows], return_inverse=True)
        num_steps = int(self._lengths[numbers].max()) if len(numbers) else 0
        outputs, _ = net.unroll(self._obs[self._grid[:num_steps, numbers]], self._starts[numbers])
        return torch.cat([self._obs[rows], outputs[self._step_of_row[rows], place]], dim=1)

    def draw(self, num_epochs: int, minibatch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The rows of every minibatch: whole sequences in a new random order each epoch, of about this many steps."""
        per_epoch = max(1, round(self.num_rows / minibatch_size))
        for _ in range(num_epochs):
            order = torch.randperm(len(self._lengths), generator=generator, device=generator.device)
            lengths = self._lengths[order]
            # With all sequences laid end to end, each belongs to the minibatch into which its middle step falls.
            middle = lengths.cumsum(0) - (lengths + 1) // 2
            minibatch = middle * per_epoch // self.num_rows
            for number in range(per_epoch):
                chosen = order[minibatch == number]
                if len(chosen):
                    yield self._grid[:, chosen][self._mask[:, chosen]]


def _stretches(segments: Sequence[Segment], memory_size: int) -> tuple[list[Array], list[Array]]:
    """The rows of each stretch, in the order of the boundaries of a `FlatBatch`, and what is remembered before it."""
    nothing = np.zeros(memory_size, np.float32)
    stretches, memories, first_row = [], [], 0
    for segment in segments:
        num_steps, width = segment.reward.shape
        rows = first_row + np.arange(num_steps * width).reshape(num_steps, width)
        is_boundary = segment.ended.copy()
        is_boundary[-1:] = True
        begins = [0] * width
        # Row by row, as `FlatBatch` numbers boundaries.
        for step, column in np.argwhere(is_boundary).tolist():
            begin = begins[column]
            stretches.append(rows[begin : step + 1, column])
            memories.append(nothing if begin or segment.memory is None else segment.memory[column])
            begins[column] = step + 1
        first_row += num_steps * width
    return stretches, memories


def _padded(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Arrays of any length side by side [T, B], padded with 0, and a mask that is true where they are not padded."""
    grid = np.zeros((max(map(len, columns), default=0), len(columns)), np.int64)
    mask = np.zeros(grid.shape, np.bool_)
    for number, column in enumerate(columns):
        grid[: len(column), number] = column
        mask[: len(column), number] = True
    return grid, mask


class SequenceSteps(AutogradSteps):
    """Gradient steps of a network with a memory: every minibatch consists of whole sequences."""

    sequences: Sequences

    def __init__(
        self, net: ActorCritic, weights: nn.Parameter, optimizer: torch.optim.Adam, group: LearnerGroup, num_bad: Tensor
    ):
        super().__init__(net, weights, optimizer, group, num_bad)
        if group.count > 1:
            raise UserError("several learners cannot share sequences of steps: leave out --num-learners or --memory")

    def arrange(
        self, segments: Sequence[AnySegment], max_steps: int
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cut the segments of the next update into sequences; return the `Sequences.remember` of this network."""
        arrays = [segment for segment in segments if isinstance(segment, Segment)]
        self.sequences = Sequences(arrays, self._recurrent.memory_size, max_steps, self._weights.device)
        return functools.partial(self.sequences.remember, self._recurrent)

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
