"""Short rollouts in the learned model, branched off real observations."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from freerun.algorithms.mbpo.ensemble import EliteModel
from freerun.algorithms.policies.networks import flatten_parameters
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.soft_networks import SoftPolicy
from freerun.core import Acceleration
from freerun.cuda_graphs import GraphedStep


class ModelRollouts:
    """A batch of rollouts that step together, with a policy and a model that do not change meanwhile."""

    def __init__(
        self, num_rows: int, model: EliteModel, policy: SoftPolicy, sizes: tuple[int, int], acceleration: Acceleration
    ):
        self.num_rows = num_rows
        self._model = model
        self._policy = copy.deepcopy(policy).requires_grad_(False)
        self._weights = flatten_parameters(self._policy).requires_grad_(False)
        self.device = self._weights.device
        obs_size, action_size = sizes
        # The newest step of every rollout, in memory that stays in place for the captured graph.
        self._obs = torch.zeros((num_rows, obs_size), device=self.device)
        self._action = torch.zeros((num_rows, action_size), device=self.device)
        self._reward = torch.zeros(num_rows, device=self.device)
        self._next_obs = torch.zeros_like(self._obs)
        self._ended = torch.zeros(num_rows, device=self.device)
        self.num_rejected = torch.zeros((), dtype=torch.int64, device=self.device)
        """Model steps that were not finite and were left out, since this was last set to zero."""
        self.take_steps = GraphedStep(self._step_once, self.device, (model.generator,), acceleration)

    def prepare(self, obs: Tensor, weights: Tensor) -> None:
        """Set the observations to start from, and copy the policy's current weights."""
        self._next_obs.copy_(obs)
        self._ended.zero_()
        self._weights.data.copy_(weights.detach())

    def run(self, length: int) -> StepBatch:
        """The finite steps of all rollouts, each up to its end."""
        parts: list[StepBatch] = []
        running: list[Tensor] = []
        for _ in range(length):
            running.append(self._ended == 0)
            self.take_steps(1)
            newest = (self._obs, self._action, self._reward, self._next_obs, self._ended)
            parts.append(StepBatch(*(column.clone() for column in newest)))
        steps = StepBatch(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        was_running = torch.cat(running)
        is_finite = steps.reward.isfinite() & steps.next_obs.isfinite().all(dim=1)
        self.num_rejected += (was_running & ~is_finite).sum()
        # The only place that waits for the device: how many steps there are depends on the data.
        rows = (was_running & is_finite).nonzero().squeeze(1)
        return StepBatch(*(column[rows] for column in steps))

    @torch.no_grad()
    def _step_once(self) -> None:
        """One step of every rollout. Those that have ended step on, and `run` leaves their steps out.

        A step that is not finite ends its rollout: what would follow from there is not finite either.
        """
        self._obs.copy_(self._next_obs)
        noise = torch.randn(self._action.shape, generator=self._model.generator, device=self.device)
        action, _ = self._policy(self._obs, noise)
        self._action.copy_(action)
        next_obs, reward, ended = self._model.predict(self._obs, action)
        self._next_obs.copy_(next_obs)
        self._reward.copy_(reward)
        is_bad = ~(reward.isfinite() & next_obs.isfinite().all(dim=1))
        # A maximum is a logical or of floats: once ended, a rollout stays so.
        self._ended.copy_(torch.maximum(self._ended, torch.maximum(ended.float(), is_bad.float())))
