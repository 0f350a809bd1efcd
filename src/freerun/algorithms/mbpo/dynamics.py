"""Trains the ensemble that models an environment, and decides when it has learned enough."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from freerun.algorithms.learners.shared_update import average_over_learners_, share_of_rows
from freerun.algorithms.learners.sliced_adam import SlicedAdam
from freerun.algorithms.mbpo.ensemble import EliteModel, Ensemble, InputScale, gaussian_loss
from freerun.algorithms.mbpo.mbpo_config import HOLDOUT_SHARE, MAX_HELD_OUT, DynamicsConfig
from freerun.algorithms.policies.networks import flatten_parameters
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.core import LearnerGroup, Metrics, SingleLearner
from freerun.cuda_graphs import GraphedStep, fused, resolve_acceleration

WEIGHT_DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
"""Of each layer, as in the paper's code. Further layers take the last but one; the output layer has the last."""
BOUNDS_PENALTY = 0.01
"""Weight of the term that pulls the learned bounds together."""
PATIENCE_EPOCHS, MIN_GAIN = 5, 0.01
"""A training stops when no network's error has fallen by this share for this many epochs."""
MIN_UPDATES_PER_EPOCH = 20
"""So that errors are not measured after every few gradient steps while there is little data."""
DIVERGED_FACTOR = 10.0
"""A training has diverged when the error on held-out steps is this many times the error at its start."""
SMALLEST_ERROR = 1e-6
"""As a share of a target's variance. Predicting a target better than this is no gain."""


@dataclass(frozen=True)
class EnsembleTraining:
    """The outcome of one training of the model."""

    num_updates: int
    holdout_error: float
    """The mean `Dynamics.holdout_error` of the elites."""
    diverged: bool


class Dynamics:
    """Trains the ensemble. Between `prepare` and the end of `fit` it touches nothing that others use.

    Several learners draw the same batches, and each computes on its share of the rows, also of those held out.
    """

    def __init__(
        self,
        config: DynamicsConfig,
        obs_size: int,
        action_size: int,
        seed: int,
        device: torch.device,
        learner_group: LearnerGroup | None = None,
    ):
        self._config = config
        self._learner_group = learner_group or SingleLearner()
        self._device = device
        with torch.random.fork_rng(devices=[]):  # the seed of the networks must not reseed anything else
            torch.manual_seed(seed)
            self.ensemble = Ensemble.of(config, config.num_models, obs_size, action_size).to(device)
        self._best = copy.deepcopy(self.ensemble).requires_grad_(False)
        self.weight_decay = self._weight_decay()
        self._weights = flatten_parameters(self.ensemble)
        self.optimizer = self._make_optimizer()
        num_inputs, num_targets = self.ensemble.num_inputs, self.ensemble.num_targets
        self._input_scale, self._target_scale = InputScale(num_inputs, device), InputScale(num_targets, device)
        self._elites = torch.arange(config.num_elites, device=device)
        # One row holds the scaled inputs and targets of a step, and whether it terminated: one gather draws a batch.
        self._column_sizes = (num_inputs, num_targets, 1)
        self._rows = torch.empty((config.buffer_size, sum(self._column_sizes)), device=device)
        self._num_train = torch.zeros((), device=device)  # on the device, where a captured graph reads it
        self._held_out = self._rows[:0]
        self.updates_per_epoch = MIN_UPDATES_PER_EPOCH
        self.generator = torch.Generator(device).manual_seed(seed)
        self.num_updates = 0
        acceleration = resolve_acceleration(config.acceleration, device)
        self._fused_loss, self._fused_rows = fused(self._loss, acceleration), fused(self._rows_at, acceleration)
        self.take_gradient_steps = GraphedStep(self._gradient_step, device, (self.generator,), acceleration)

    def _make_optimizer(self) -> torch.optim.Adam:
        return SlicedAdam(self._weights, self._config.model_learning_rate)

    def _weight_decay(self) -> Tensor:
        """The decay of every weight, in the order of the flat buffer. Biases and variance bounds have none."""
        layers = [*WEIGHT_DECAY[:-1], *itertools.repeat(WEIGHT_DECAY[-2], 100)]
        decays = []
        for name, parameter in self.ensemble.named_parameters():
            part, _, number = name.rpartition(".")
            is_last = number == str(len(self.ensemble.nets.weights) - 1)
            # Parameters are named nets.weights.0, nets.weights.1, … in the order of the layers.
            decay = 0.0 if part != "nets.weights" else WEIGHT_DECAY[-1] if is_last else layers[int(number)]
            decays.append(torch.full((parameter.numel(),), decay, device=self._device))
        return torch.cat(decays)

    def prepare(self, steps: StepBatch) -> None:
        """Copy the steps to learn from, hold some of them out, and fit both scales to the others."""
        num_rows = len(steps.reward)
        x = torch.cat([steps.obs, steps.action], dim=1)
        # Targets: (s' - s, r). A change is easier to learn than s' itself, which is mostly s.
        y = torch.cat([steps.next_obs - steps.obs, steps.reward[:, None]], dim=1)
        order = torch.rand(num_rows, generator=self.generator, device=self._device).argsort()
        num_held_out = min(int(HOLDOUT_SHARE * num_rows), MAX_HELD_OUT)
        held_out, train = order[:num_held_out], order[num_held_out:]
        self._input_scale.fit(x[train])
        self._target_scale.fit(y[train])
        rows = torch.cat([self._input_scale.apply(x), self._target_scale.apply(y), steps.terminated[:, None]], dim=1)
        self._rows[: len(train)] = rows[train]
        self._held_out = rows[held_out]
        self._num_train.fill_(len(train))
        self.updates_per_epoch = max(math.ceil(len(train) / self._config.model_batch_size), MIN_UPDATES_PER_EPOCH)

    def fit(self, max_updates: int) -> EnsembleTraining:
        """Train until no network gains any more; each ends with the weights that did best on the held-out steps."""
        self._best.load_state_dict(self.ensemble.state_dict())
        limit = DIVERGED_FACTOR * self.holdout_error()
        # The first epoch counts in any case. Compared with the error before it, a good model would never gain one per
        # cent from a few new steps, would be set back every time, and would never learn from them.
        best = torch.full_like(limit, torch.inf)
        num_updates = num_stale_epochs = 0
        while True:
            num_in_epoch = min(self.updates_per_epoch, max_updates - num_updates)
            self.take_gradient_steps(num_in_epoch)
            num_updates += num_in_epoch
            error = self.holdout_error()
            # By network: each keeps the weights of its own best epoch.
            is_better = (error < (1 - MIN_GAIN) * best) & (error <= limit)
            best = torch.where(is_better, error, best)
            for best_weights, weights in zip(self._best.parameters(), self.ensemble.parameters(), strict=True):
                best_weights.data.copy_(torch.where(is_better[:, None, None], weights.detach(), best_weights))
            num_stale_epochs = 0 if bool(is_better.any()) else num_stale_epochs + 1
            if num_stale_epochs >= PATIENCE_EPOCHS or num_updates >= max_updates:
                break
        self.num_updates += num_updates
        # NaN compares as false, so an error that is not a number has diverged as well.
        diverged = not bool((error <= limit).all())
        for weights, best_weights in zip(self.ensemble.parameters(), self._best.parameters(), strict=True):
            weights.data.copy_(best_weights)
        if diverged:
            self.optimizer = self._make_optimizer()  # its moments are as spoilt as the weights were
            self.take_gradient_steps.forget()
            # A network without any good epoch is back at the weights it had before, so its error is theirs.
            best = torch.where(best.isinf(), self.holdout_error(), best)
        self._elites = best.argsort()[: self._config.num_elites]
        return EnsembleTraining(num_updates, float(best[self._elites].mean()), diverged)

    def hand_over(self, model: EliteModel) -> None:
        """Copy the elites of the last training into the model that rollouts use."""
        model.take(self.ensemble, self._elites, self._input_scale, self._target_scale)

    def _gradient_step(self) -> None:
        """One step of every network, each on a batch of its own."""
        num_nets, num_rows = len(self.ensemble.lowest), self._config.model_batch_size
        uniform = torch.rand((num_nets, num_rows), generator=self.generator, device=self._device)
        mine = share_of_rows(self._learner_group, num_rows)
        loss = self._fused_loss(self._fused_rows(uniform[:, mine]))
        gradients = torch.autograd.grad(loss, list(self.ensemble.parameters()))
        gradient = self._weights.grad
        assert gradient is not None
        torch.cat([part.reshape(-1) for part in gradients], out=gradient)
        average_over_learners_(self._learner_group, gradient, (mine.stop - mine.start) / num_rows)
        # L2 regularisation: g <- g + decay * w
        gradient.addcmul_(self.weight_decay, self._weights.detach())
        self.optimizer.step()

    def _rows_at(self, uniform: Tensor) -> Tensor:
        """The rows to learn from at places that are given as numbers in [0, 1)."""
        # Rounding may give num_train itself, which is no row.
        return self._rows[torch.minimum((uniform * self._num_train).long(), self._num_train.long() - 1)]

    def _loss(self, rows: Tensor) -> Tensor:
        """The sum over the networks, so that each learns as if it were alone.

        Chua et al. 2018, section 4 and appendix A.1: negative log-likelihood + 0.01 * (sum(max) - sum(min)).
        """
        x, y, terminated = torch.split(rows, list(self._column_sizes), dim=2)
        mean, log_variance, end = self.ensemble(x)
        loss = gaussian_loss(mean, log_variance, y).sum()
        loss = loss + BOUNDS_PENALTY * (self.ensemble.highest.sum() - self.ensemble.lowest.sum())
        if end.shape[2]:
            # The mean over all networks, times their number.
            loss = loss + functional.binary_cross_entropy_with_logits(end, terminated) * len(end)
        return loss

    @torch.no_grad()
    def holdout_error(self) -> Tensor:
        """The squared error of each network on the held-out steps, as the geometric mean over the targets.

        The plain mean would be dominated by the target that is hardest to predict, and training would stop while the
        others still gain: of five targets of InvertedPendulum, the reward made up nine tenths of it.
        """
        num_rows = len(self._held_out)
        my_rows = self._held_out[share_of_rows(self._learner_group, num_rows)]
        x, y, _ = torch.split(my_rows, list(self._column_sizes), dim=1)
        mean, _, _ = self.ensemble(x.expand(len(self.ensemble.lowest), *x.shape))
        squares = (mean - y).square()
        errors = squares.mean(dim=1) if self._learner_group.count == 1 else squares.sum(dim=1) / num_rows
        self._learner_group.sum(errors)
        # exp(mean_d log(error_d))
        error: Tensor = errors.clamp(min=SMALLEST_ERROR).log().mean(dim=1).exp()
        return error

    def metrics(self) -> Metrics:
        return {"dynamics_updates": float(self.num_updates)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "nets": self.ensemble.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ensemble.load_state_dict(state["nets"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps the tensors that it is given
        self.generator.set_state(state["generator"].cpu())
        self.num_updates = int(state["num_updates"])
