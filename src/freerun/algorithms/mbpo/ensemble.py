"""An ensemble of networks that predict what a step leads to, each as a Gaussian (Chua et al. 2018, PETS)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from freerun.algorithms.learners.shared_update import join_shares, share_of_rows
from freerun.algorithms.mbpo.mbpo_config import DynamicsConfig
from freerun.algorithms.mbpo.terminations import find
from freerun.algorithms.policies.networks import StackedMLP
from freerun.core import LearnerGroup, SingleLearner

LOG_VARIANCE_BOUNDS = (-10.0, 0.5)
"""Where the learned bounds of the log-variances start, as in the paper's code."""
SMALLEST_DEVIATION = 1e-3
"""Columns with a smaller deviation are taken as constant and are not scaled."""


class InputScale:
    """The mean and deviation of rows. They are fitted in place, because a captured graph knows only where they lie."""

    def __init__(self, size: int, device: torch.device):
        self.mean, self.std = torch.zeros(size, device=device), torch.ones(size, device=device)

    def fit(self, rows: Tensor) -> None:
        self.mean.copy_(rows.mean(dim=0))
        std = rows.std(dim=0)
        self.std.copy_(torch.where(std < SMALLEST_DEVIATION, torch.ones_like(std), std))

    def copy_from(self, other: InputScale) -> None:
        self.mean.copy_(other.mean)
        self.std.copy_(other.std)

    def apply(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.std

    def undo(self, rows: Tensor) -> Tensor:
        return rows * self.std + self.mean


class Ensemble(nn.Module):
    """Networks that share nothing but their shape.

    Outputs are the change of the observation and the reward, as means and log-variances within learned bounds, and a
    logit for the end of the episode where that is learned.
    """

    def __init__(self, num_nets: int, num_inputs: int, hidden_sizes: tuple[int, ...], num_targets: int, ends: bool):
        super().__init__()
        self.num_inputs, self.num_targets = num_inputs, num_targets
        self.nets = StackedMLP(num_nets, (num_inputs, *hidden_sizes, 2 * num_targets + ends), functional.silu)
        for weight in self.nets.weights:
            # Truncated normal with std 1 / (2 sqrt(inputs)), as in the paper's code.
            std = 1 / (2 * math.sqrt(weight.shape[1]))
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        low, high = LOG_VARIANCE_BOUNDS
        self.lowest = nn.Parameter(torch.full((num_nets, 1, num_targets), low))
        self.highest = nn.Parameter(torch.full((num_nets, 1, num_targets), high))

    @classmethod
    def of(cls, config: DynamicsConfig, num_nets: int, obs_size: int, action_size: int) -> Ensemble:
        """Networks (s, a) -> (s' - s, r), and a logit for the end where no rule is known for it."""
        learns_end = find(config.termination) is None
        return cls(num_nets, obs_size + action_size, config.model_hidden_sizes, obs_size + 1, learns_end)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[K, B, inputs] -> means, log-variances, logits of the end."""
        return split_and_bound(self.nets(x), self.lowest, self.highest)


def split_and_bound(output: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a network's output, with log-variances softly bounded (Chua et al. 2018, appendix A.1)."""
    size = lowest.shape[-1]
    mean, log_variance, end = output[..., :size], output[..., size : 2 * size], output[..., 2 * size :]
    # log_var <- max - softplus(max - log_var), then log_var <- min + softplus(log_var - min)
    # Unlike a clamp, softplus lets gradients pass also beyond the bounds.
    log_variance = highest - functional.softplus(highest - log_variance)
    log_variance = lowest + functional.softplus(log_variance - lowest)
    return mean, log_variance, end


def gaussian_loss(mean: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    """The negative log-likelihood of each network, up to factors and constants: [K, B, D] -> [K]."""
    # -2 log N(y; mean, var) = (mean - y)^2 / var + log var + const
    return ((mean - target).square() * (-log_variance).exp() + log_variance).mean(dim=(1, 2))


class EliteModel:
    """The best networks of one training, frozen. Rollouts use them while the next training goes on.

    Several learners predict the same rows, each its share of them.
    """

    def __init__(self, ensemble: Ensemble, termination: str, seed: int, learner_group: LearnerGroup | None = None):
        """`ensemble` has as many networks as there are elites; `take` overwrites their weights."""
        self._learner_group = learner_group or SingleLearner()
        self.version = 0
        self.termination = find(termination)
        """The rule that ends episodes; None where the networks have learned it."""
        self.ensemble = ensemble.requires_grad_(False)
        device = ensemble.lowest.device
        self._input_scale = InputScale(ensemble.num_inputs, device)
        self._target_scale = InputScale(ensemble.num_targets, device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def take(self, ensemble: Ensemble, elites: Tensor, input_scale: InputScale, target_scale: InputScale) -> None:
        """Copy the elites of a training: the model's next version."""
        for mine, theirs in zip(self.ensemble.parameters(), ensemble.parameters(), strict=True):
            mine.data.copy_(theirs.detach()[elites])
        self._input_scale.copy_from(input_scale)
        self._target_scale.copy_from(target_scale)
        self.version += 1

    def predict(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the steps lead to: next observations, rewards, and whether the episode ends.

        Each row is predicted by one elite, chosen at random. Every elite gets equally many rows, so that one batched
        product serves all.
        """
        num_elites, num_rows = self.ensemble.lowest.shape[0], len(obs)
        if num_rows % num_elites:
            raise ValueError(f"{num_rows} rows cannot be shared out among {num_elites} elites")
        # Sorting random numbers gives a random order without asking the host, which `randperm` may do.
        order = torch.rand(num_rows, generator=self.generator, device=obs.device).argsort()
        x = self._input_scale.apply(torch.cat([obs, action], dim=1))[order]
        x = x.view(num_elites, num_rows // num_elites, -1)
        num_targets = self.ensemble.num_targets
        mine = share_of_rows(self._learner_group, x.shape[1])
        mean, log_variance, end = self.ensemble(x[:, mine])
        noise = torch.randn((*x.shape[:2], num_targets), generator=self.generator, device=obs.device)[:, mine]
        # Sample: y = mean + sqrt(var) * noise
        outputs = torch.cat([mean + (0.5 * log_variance).exp() * noise, end], dim=2)
        outputs = join_shares(self._learner_group, outputs, x.shape[1], dim=1)
        sampled, end = torch.split(outputs, [num_targets, end.shape[2]], dim=2)
        # Back into the order of the rows.
        sampled = sampled.reshape(num_rows, -1)
        target = torch.empty_like(sampled)
        target[order] = sampled
        # The networks predict (s' - s, r), scaled: s' = s + change
        change = self._target_scale.undo(target)
        next_obs, reward = obs + change[:, :-1], change[:, -1]
        if self.termination is not None:
            return next_obs, reward, self.termination(next_obs)
        ended = torch.empty(num_rows, dtype=torch.bool, device=obs.device)
        # A logit above 0 is a probability above one half.
        ended[order] = end.reshape(-1) > 0
        return next_obs, reward, ended

    def _scale_tensors(self) -> tuple[Tensor, ...]:
        return self._input_scale.mean, self._input_scale.std, self._target_scale.mean, self._target_scale.std

    def state_dict(self) -> dict[str, Any]:
        return {
            "nets": self.ensemble.state_dict(),
            "scales": self._scale_tensors(),
            "version": self.version,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ensemble.load_state_dict(state["nets"])
        for mine, theirs in zip(self._scale_tensors(), state["scales"], strict=True):
            mine.copy_(theirs)
        self.version = int(state["version"])
        self.generator.set_state(state["generator"].cpu())
