"""PPO's gradient steps on a GPU: one of them is captured as a CUDA graph and replayed for every minibatch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.objective import PPOLosses
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import Acceleration
from freerun.cuda_graphs import GraphedStep, fused, waits_for_device

logger = logging.getLogger("freerun")


class GraphBuffers(NamedTuple):
    """The memory that the captured gradient step reads and writes. It must stay in place."""

    batch: TrainingBatch
    minibatches: Tensor
    """The rows of every minibatch, [gradient steps, rows]."""
    cursor: Tensor
    """The number of the next minibatch, on the device: a graph cannot take arguments."""
    loss_sums: Tensor
    """Sums of policy loss and value loss over the gradient steps that were taken."""
    change_sums: Tensor
    """Sums of the approximate KL divergence and the clipped fraction over the minibatches that were looked at."""
    num_steps: Tensor
    num_minibatches: Tensor
    """One more than `num_steps` if the last minibatch showed that the policy had moved too far."""
    has_stopped: Tensor
    """True once the policy has moved too far: a graph cannot end early, so the steps that follow change nothing."""

    @classmethod
    def around(cls, batch: TrainingBatch, minibatches: Tensor) -> GraphBuffers:
        device = minibatches.device
        loss_sums, change_sums = torch.zeros((2, 2), device=device)
        num_steps, num_minibatches = torch.zeros((2, 1), device=device)
        cursor = torch.zeros(1, dtype=torch.int64, device=device)
        has_stopped = torch.zeros((), dtype=torch.bool, device=device)
        return cls(batch, minibatches, cursor, loss_sums, change_sums, num_steps, num_minibatches, has_stopped)

    def have_room_for(self, batch: TrainingBatch, minibatches: Tensor) -> bool:
        """True if these fit: minibatches of the size that was captured, and not more rows than there is room for."""
        room, needed = (self.minibatches, *self.batch), (minibatches, *batch)
        return all(
            len(part) <= len(buffer) and part.shape[1:] == buffer.shape[1:]
            for buffer, part in zip(room, needed, strict=True)
        )

    def restart(self) -> None:
        for counter in self[2:]:
            assert isinstance(counter, Tensor)
            counter.zero_()

    def measured(self) -> Tensor:
        """The means of both losses and of the policy's change, and the number of gradient steps."""
        return torch.cat([self.loss_sums / self.num_steps, self.change_sums / self.num_minibatches, self.num_steps])


def _with_room(part: Tensor) -> Tensor:
    """The same rows, and room for a quarter more."""
    return torch.cat([part, torch.zeros_like(part[: len(part) // 4 + 1])])


class GraphedEpochs:
    """Runs all minibatches of an update without asking the device for anything in between."""

    def __init__(
        self,
        losses: Callable[[TrainingBatch], PPOLosses],
        measure_change: Callable[[Tensor], Tensor],
        goes_too_far: Callable[[Tensor], Tensor] | None,
        take_step: Callable[[PPOLosses, Tensor, Tensor, Tensor | None], None],
        device: torch.device,
        acceleration: Acceleration,
    ):
        """The functions are PPO's: a minibatch's losses, how far the policy has moved, whether a KL divergence ends the
        update, and a step down a loss. That one gets the KL divergence, whether it tells of an earlier step of the same
        update, and whether the step is to be skipped."""
        self._losses = losses
        self._measure_change = measure_change
        self._goes_too_far = goes_too_far
        self._take_step = take_step
        self._device = device
        self._acceleration = acceleration
        self._fused_losses = fused(self._losses_of_rows, acceleration)
        self._buffers: GraphBuffers | None = None

    def run(self, batch: TrainingBatch, minibatches: Sequence[Tensor]) -> Tensor:
        """Take one gradient step per minibatch; all have the same size. Returns `GraphBuffers.measured`."""
        order = torch.stack(list(minibatches))
        if self._buffers is None:
            self._capture_around(batch, order)
        elif not self._buffers.have_room_for(batch, order):
            # Updates differ in size, so there is room for more than this one: each capture takes time.
            self._capture_around(TrainingBatch(*map(_with_room, batch)), _with_room(order))
        buffers = self._buffers
        assert buffers is not None
        for buffer, source in zip((*buffers.batch, buffers.minibatches), (*batch, order), strict=True):
            # At the first capture the batch itself has become the buffer.
            if buffer is not source:
                buffer[: len(source)].copy_(source)
        buffers.restart()
        self._graphed_step(len(order))
        return buffers.measured()

    def _capture_around(self, batch: TrainingBatch, order: Tensor) -> None:
        self._buffers = GraphBuffers.around(batch, order)
        self._graphed_step = GraphedStep(self._step_once, self._device, (), self._acceleration)

    def forget(self) -> None:
        """Capture again at the next update, because the optimiser's tensors have been replaced."""
        self._buffers = None

    def _losses_of_rows(self, rows: Tensor, *batch: Tensor) -> PPOLosses:
        return self._losses(TrainingBatch(*batch).select(rows))

    def _step_once(self) -> None:
        """The captured step: only the device knows which minibatch it is."""
        assert self._buffers is not None
        batch, minibatches, cursor, loss_sums, change_sums, num_steps, num_minibatches, has_stopped = self._buffers
        # A tensor as index keeps the choice on the device; an int would be fixed at the capture.
        rows = minibatches.index_select(0, cursor).squeeze(0)
        losses = self._fused_losses(rows, *batch)
        change = self._measure_change(losses.log_ratio)
        both_losses = torch.stack([losses.policy_loss, losses.value_loss])
        tells_of_step = cursor[0] > 0
        if self._goes_too_far is None:
            self._take_step(losses, change[0], tells_of_step, None)
            num_steps += 1
            num_minibatches += 1
        else:
            # The minibatch that shows too large a change is looked at, but takes no step.
            change = change.masked_fill(has_stopped, 0.0)
            num_minibatches += ~has_stopped
            has_stopped |= self._goes_too_far(change[0])
            self._take_step(losses, change[0], tells_of_step & ~has_stopped, has_stopped)
            both_losses = both_losses.masked_fill(has_stopped, 0.0)
            num_steps += ~has_stopped
        loss_sums += both_losses
        change_sums += change
        cursor += 1


def acceleration_of(config: PPOConfig, net: ActorCritic, device: torch.device) -> Acceleration:
    """`auto` captures gradient steps but does not fuse kernels, which takes half a minute before the first update."""
    if device.type != "cuda" or config.acceleration == "none" or config.has_memory:
        return "none"
    if config.network is not None and waits_for_device(functools.partial(_try_networks, copy.deepcopy(net))):
        logger.warning(
            "the network of --network makes the host wait for the GPU: gradient steps are not recorded as CUDA graphs"
        )
        return "none"
    return "graph" if config.acceleration == "auto" else config.acceleration


def _try_networks(net: ActorCritic) -> None:
    """One forward and one backward pass of both networks."""
    obs = torch.zeros((2, net.row_size), device=net.obs_mean.device)
    (net.head(obs).sum() + net.value(obs).sum()).backward()  # type: ignore[no-untyped-call]
