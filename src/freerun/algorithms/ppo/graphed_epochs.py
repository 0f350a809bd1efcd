"""PPO's gradient steps on a GPU: one of them is captured as a CUDA graph and replayed for every minibatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freerun.algorithms.ppo.objective import PPOLosses
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import Acceleration
from freerun.cuda_graphs import GraphedStep, fused


class GraphBuffers(NamedTuple):
    """The memory that the captured gradient step reads and writes. It must stay in place."""

    batch: TrainingBatch
    minibatches: Tensor
    """The rows of every minibatch, [gradient steps, rows]."""
    cursor: Tensor
    """The number of the next minibatch, on the device: a graph cannot take arguments."""
    sums: Tensor
    """Sums of policy loss, value loss, approximate KL divergence and clipped fraction over the gradient steps."""


class GraphedEpochs:
    """Runs all minibatches of an update without asking the device for anything in between."""

    def __init__(
        self,
        losses: Callable[[TrainingBatch], PPOLosses],
        measure_change: Callable[[Tensor], Tensor],
        take_step: Callable[[PPOLosses], None],
        device: torch.device,
        acceleration: Acceleration,
    ):
        """The functions are PPO's: a minibatch's losses, how far the policy has moved, and a step down a loss."""
        self._losses = losses
        self._measure_change = measure_change
        self._take_step = take_step
        self._device = device
        self._acceleration = acceleration
        self._fused_losses = fused(self._losses_of_rows, acceleration)
        self._buffers: GraphBuffers | None = None

    def run(self, batch: TrainingBatch, minibatches: Sequence[Tensor]) -> Tensor:
        """Take one gradient step per minibatch; all have the same size. Returns the means of `GraphBuffers.sums`."""
        order = torch.stack(list(minibatches))
        shapes = (order.shape, batch.obs.shape)  # more epochs of fewer rows may have minibatches of the same shape
        if self._buffers is None or (self._buffers.minibatches.shape, self._buffers.batch.obs.shape) != shapes:
            cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._buffers = GraphBuffers(batch, order, cursor, torch.zeros(4, device=self._device))
            self._graphed_step = GraphedStep(self._step_once, self._device, (), self._acceleration)
        buffers = self._buffers
        for buffer, source in zip((*buffers.batch, buffers.minibatches), (*batch, order), strict=True):
            # At a capture the batch itself has become the buffer.
            if buffer is not source:
                buffer.copy_(source)
        buffers.cursor.zero_()
        buffers.sums.zero_()
        self._graphed_step(len(order))
        return buffers.sums / len(order)

    def forget(self) -> None:
        """Capture again at the next update, because the optimiser's tensors have been replaced."""
        self._buffers = None

    def _losses_of_rows(self, rows: Tensor, *batch: Tensor) -> PPOLosses:
        return self._losses(TrainingBatch(*batch).select(rows))

    def _step_once(self) -> None:
        """The captured step: only the device knows which minibatch it is."""
        assert self._buffers is not None
        batch, minibatches, cursor, sums = self._buffers
        # A tensor as index keeps the choice on the device; an int would be fixed at the capture.
        rows = minibatches.index_select(0, cursor).squeeze(0)
        losses = self._fused_losses(rows, *batch)
        self._take_step(losses)
        change = self._measure_change(losses.log_ratio)
        sums += torch.cat([torch.stack([losses.policy_loss, losses.value_loss]), change])
        cursor += 1
