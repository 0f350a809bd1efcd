"""A learned model of an environment: an ensemble of networks, each a Gaussian over what a step leads to."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from freerun.algorithms.networks import StackedMLP, share_one_buffer
from freerun.algorithms.replay import Steps
from freerun.algorithms.sharing import average, portion, whole
from freerun.algorithms.soft_agent import SACConfig
from freerun.algorithms.terminations import LEARNED, find
from freerun.capture import Repeated, choose, fused
from freerun.core import Acceleration, Alone, Metrics, Peers, UserError, require_positive

WEIGHT_DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
"""Per layer, as in the paper's code; further layers take the last but one."""
LOG_VARIANCE_BOUNDS = (-10.0, 0.5)
BOUNDS_PENALTY = 0.01
HOLDOUT_SHARE, MOST_HELD_OUT = 0.2, 5000
PATIENCE_EPOCHS, LEAST_GAIN = 5, 0.01
FEWEST_UPDATES_PER_EPOCH = 20
DIVERGED = 10.0
"""Times the error at the start of a training, on steps that were held out."""
SMALLEST_DEVIATION = 1e-3
SMALLEST_ERROR = 1e-6
"""Of the variance of a target: to predict it better than this is no gain."""


@dataclass(frozen=True)
class DynamicsConfig(SACConfig):
    num_models: int = 7
    """Networks in the ensemble."""
    num_elites: int = 5
    """The best of them on steps that were held out; the others are not rolled out."""
    model_hidden_sizes: tuple[int, ...] = (200, 200, 200, 200)
    """Hidden layers of the model."""
    model_learning_rate: float = 1e-3
    """Adam's step size for the model."""
    model_batch_size: int = 256
    """Steps in a gradient step of each network of the model."""
    model_updates_per_step: float = 10.0
    """Gradient steps of the model per environment step, at most: a training ends early once it no longer helps."""
    steps_per_model_training: int = 250
    """Environment steps from one training of the model to the next."""
    termination: str = LEARNED
    """When episodes end in the model: learned, never, the rule of a known environment (hopper, walker2d, ant,
    humanoid, inverted-pendulum), or your own function of the next observations as module:callable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_elites <= self.num_models:
            raise UserError(f"--num-elites must lie between 1 and --num-models, not {self.num_elites}")
        require_positive(self, "model_batch_size", "steps_per_model_training", "model_hidden_sizes")
        if self.model_learning_rate <= 0 or self.model_updates_per_step <= 0:
            raise UserError("--model-learning-rate and --model-updates-per-step must be above 0")
        find(self.termination)


class Scale:
    """Mean and deviation of rows; fitted in place, for a recorded graph knows only where they lie."""

    def __init__(self, size: int, device: torch.device):
        self.mean, self.std = torch.zeros(size, device=device), torch.ones(size, device=device)

    def fit(self, rows: Tensor) -> None:
        self.mean.copy_(rows.mean(dim=0))
        std = rows.std(dim=0)
        self.std.copy_(torch.where(std < SMALLEST_DEVIATION, torch.ones_like(std), std))

    def copy_from(self, other: Scale) -> None:
        self.mean.copy_(other.mean)
        self.std.copy_(other.std)

    def apply(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.std

    def undo(self, rows: Tensor) -> Tensor:
        return rows * self.std + self.mean


class Ensemble(nn.Module):
    """Networks that share nothing but their shape. Outputs: change of the observation and reward, as means and
    log-variances within learned bounds, and (where the end of episodes is learned) a logit for the end."""

    def __init__(self, num_nets: int, num_inputs: int, hidden_sizes: tuple[int, ...], num_targets: int, ends: bool):
        super().__init__()
        self.num_targets = num_targets
        self.nets = StackedMLP(num_nets, (num_inputs, *hidden_sizes, 2 * num_targets + ends), functional.silu)
        for weight in self.nets.weights:
            std = 1 / (2 * math.sqrt(weight.shape[1]))
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        low, high = LOG_VARIANCE_BOUNDS
        self.lowest = nn.Parameter(torch.full((num_nets, 1, num_targets), low))
        self.highest = nn.Parameter(torch.full((num_nets, 1, num_targets), high))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[K, B, inputs] -> means, log-variances, logits of the end."""
        return bounded(self.nets(x), self.lowest, self.highest)


def bounded(output: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a network's output; log-variances are kept softly between bounds."""
    size = lowest.shape[-1]
    mean, log_variance, end = output[..., :size], output[..., size : 2 * size], output[..., 2 * size :]
    log_variance = highest - functional.softplus(highest - log_variance)
    log_variance = lowest + functional.softplus(log_variance - lowest)
    return mean, log_variance, end


def gaussian_loss(mean: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood per network, up to a constant: [K, B, D] -> [K]."""
    return ((mean - target).square() * (-log_variance).exp() + log_variance).mean(dim=(1, 2))


class Model:
    """The elites of one training, frozen: what rollouts use while the next training goes on.

    Several learners predict the same rows, each its share of them.
    """

    def __init__(
        self,
        config: DynamicsConfig,
        obs_size: int,
        action_size: int,
        seed: int,
        device: torch.device,
        peers: Peers | None = None,
    ):
        self._peers = peers or Alone()
        self.version = 0
        self._ends = find(config.termination)
        sizes = (obs_size + action_size, config.model_hidden_sizes, obs_size + 1)
        self._nets = Ensemble(config.num_elites, *sizes, ends=self._ends is None).to(device).requires_grad_(False)
        self._inputs = Scale(obs_size + action_size, device)
        self._targets = Scale(obs_size + 1, device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def take(self, nets: Ensemble, elites: Tensor, inputs: Scale, targets: Scale) -> None:
        """The next version."""
        for mine, theirs in zip(self._nets.parameters(), nets.parameters(), strict=True):
            mine.data.copy_(theirs.detach()[elites])
        self._inputs.copy_from(inputs)
        self._targets.copy_from(targets)
        self.version += 1

    def predict(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the steps lead to: next observations, rewards, and whether the episode ends. Each row is predicted by
        an elite of its own choice; every elite gets equally many, so that one batched product serves all."""
        num_elites, num_rows = self._nets.lowest.shape[0], len(obs)
        if num_rows % num_elites:
            raise ValueError(f"{num_rows} rows cannot be shared out among {num_elites} elites")
        # Sorting random numbers gives a random order without asking the host (which `randperm` may do).
        order = torch.rand(num_rows, generator=self.generator, device=obs.device).argsort()
        x = self._inputs.apply(torch.cat([obs, action], dim=1))[order].view(num_elites, num_rows // num_elites, -1)
        noise_shape = (*x.shape[:2], self._nets.num_targets)
        mine = portion(self._peers, x.shape[1])
        mean, log_variance, end = self._nets(x[:, mine])
        noise = torch.randn(noise_shape, generator=self.generator, device=obs.device)[:, mine]
        parts = torch.cat([mean + (0.5 * log_variance).exp() * noise, end], dim=2)
        drawn, end = torch.split(whole(self._peers, parts, x.shape[1], dim=1), [noise_shape[2], end.shape[2]], dim=2)
        drawn = drawn.reshape(num_rows, -1)
        predicted = torch.empty_like(drawn)
        predicted[order] = drawn
        change = self._targets.undo(predicted)
        next_obs, reward = obs + change[:, :-1], change[:, -1]
        if self._ends is not None:
            return next_obs, reward, self._ends(next_obs)
        ended = torch.empty(num_rows, dtype=torch.bool, device=obs.device)
        ended[order] = end.reshape(-1) > 0
        return next_obs, reward, ended

    def state_dict(self) -> dict[str, Any]:
        scales = (self._inputs.mean, self._inputs.std, self._targets.mean, self._targets.std)
        return {
            "nets": self._nets.state_dict(),
            "scales": scales,
            "version": self.version,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._nets.load_state_dict(state["nets"])
        scales = (self._inputs.mean, self._inputs.std, self._targets.mean, self._targets.std)
        for mine, theirs in zip(scales, state["scales"], strict=True):
            mine.copy_(theirs)
        self.version = int(state["version"])
        self.generator.set_state(state["generator"].cpu())


@dataclass(frozen=True)
class Training:
    """What came of one training of the model."""

    num_updates: int
    holdout_error: float
    """Of the elites, on steps that were held out: see `_holdout_error`."""
    diverged: bool


class Dynamics:
    """Trains the ensemble. Between `prepare` and the end of `fit` it touches nothing that others use.

    Several learners draw the same batches, and each works on its share of the rows, also of those held out.
    """

    def __init__(
        self,
        config: DynamicsConfig,
        obs_size: int,
        action_size: int,
        seed: int,
        device: torch.device,
        peers: Peers | None = None,
    ):
        self._config = config
        self._peers = peers or Alone()
        self._device = device
        ends = find(config.termination) is None
        num_inputs, num_targets = obs_size + action_size, obs_size + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nets = Ensemble(config.num_models, num_inputs, config.model_hidden_sizes, num_targets, ends)
        self._nets = nets.to(device)
        self._best = copy.deepcopy(self._nets).requires_grad_(False)
        self._decay = self._weight_decay()
        self._weights = share_one_buffer(self._nets)
        self._optimizer = self._make_optimizer()
        self._inputs, self._targets = Scale(num_inputs, device), Scale(num_targets, device)
        self._elites = torch.arange(config.num_elites, device=device)
        self._rows = torch.empty((config.buffer_size, num_inputs + num_targets + 1), device=device)
        self._sizes = (num_inputs, num_targets, 1)
        self._num_train = torch.zeros((), device=device)
        self._held_out = self._rows[:0]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.num_updates = 0
        acceleration: Acceleration = choose(config.acceleration, device)
        self._loss = fused(self._loss_of_all, acceleration)
        self._learn = Repeated(self._learn_once, device, (self.generator,), acceleration)

    def _make_optimizer(self) -> torch.optim.Adam:
        on_gpu = self._device.type == "cuda"
        return torch.optim.Adam([self._weights], self._config.model_learning_rate, fused=True, capturable=on_gpu)

    def _weight_decay(self) -> Tensor:
        """For every weight, in the order of the one buffer that they will share."""
        layers = [*WEIGHT_DECAY[:-1], *itertools.repeat(WEIGHT_DECAY[-2], 100)]
        decays = []
        for name, parameter in self._nets.named_parameters():
            part, _, number = name.rpartition(".")
            is_last = number == str(len(self._nets.nets.weights) - 1)
            decay = 0.0 if part != "nets.weights" else WEIGHT_DECAY[-1] if is_last else layers[int(number)]
            decays.append(torch.full((parameter.numel(),), decay, device=self._device))
        return torch.cat(decays)

    def prepare(self, steps: Steps) -> None:
        """Copy the steps to learn from, hold some of them out, and fit both scales to the others."""
        num_rows = len(steps.reward)
        x = torch.cat([steps.obs, steps.action], dim=1)
        y = torch.cat([steps.next_obs - steps.obs, steps.reward[:, None]], dim=1)
        order = torch.rand(num_rows, generator=self.generator, device=self._device).argsort()
        num_held_out = min(int(HOLDOUT_SHARE * num_rows), MOST_HELD_OUT)
        held_out, train = order[:num_held_out], order[num_held_out:]
        self._inputs.fit(x[train])
        self._targets.fit(y[train])
        rows = torch.cat([self._inputs.apply(x), self._targets.apply(y), steps.terminated[:, None]], dim=1)
        self._rows[: len(train)] = rows[train]
        self._held_out = rows[held_out]
        self._num_train.fill_(len(train))
        self._updates_per_epoch = max(math.ceil(len(train) / self._config.model_batch_size), FEWEST_UPDATES_PER_EPOCH)

    def fit(self, max_updates: int) -> Training:
        """Train until no network gains any more; each ends with the weights that did best on the held-out steps."""
        self._best.load_state_dict(self._nets.state_dict())
        limit = DIVERGED * self._holdout_error()
        # The first epoch counts in any case. Against the error of before it, a model that is good already would never
        # gain one per cent from a few new steps, be set back every time, and never learn from them.
        best = torch.full_like(limit, torch.inf)
        done = stale = 0
        while True:
            num_updates = min(self._updates_per_epoch, max_updates - done)
            self._learn(num_updates)
            done += num_updates
            error = self._holdout_error()
            better = (error < (1 - LEAST_GAIN) * best) & (error <= limit)
            best = torch.where(better, error, best)
            for kept, now in zip(self._best.parameters(), self._nets.parameters(), strict=True):
                kept.data.copy_(torch.where(better[:, None, None], now.detach(), kept))
            stale = 0 if bool(better.any()) else stale + 1
            if stale >= PATIENCE_EPOCHS or done >= max_updates:
                break
        self.num_updates += done
        # NaN compares as false, so what is not a number has diverged as well.
        diverged = not bool((error <= limit).all())
        for now, kept in zip(self._nets.parameters(), self._best.parameters(), strict=True):
            now.data.copy_(kept)
        if diverged:
            self._optimizer = self._make_optimizer()  # its moments are as spoilt as the weights were
            self._learn.forget()
            best = torch.where(best.isinf(), self._holdout_error(), best)
        self._elites = best.argsort()[: self._config.num_elites]
        return Training(done, float(best[self._elites].mean()), diverged)

    def hand_over(self, model: Model) -> None:
        model.take(self._nets, self._elites, self._inputs, self._targets)

    def _learn_once(self) -> None:
        num_nets, num_rows = len(self._nets.lowest), self._config.model_batch_size
        chance = torch.rand((num_nets, num_rows), generator=self.generator, device=self._device)
        index = torch.minimum((chance * self._num_train).long(), self._num_train.long() - 1)
        mine = portion(self._peers, num_rows)
        loss = self._loss(self._rows[index[:, mine]])
        gradients = torch.autograd.grad(loss, list(self._nets.parameters()))
        gradient = self._weights.grad
        assert gradient is not None
        torch.cat([part.reshape(-1) for part in gradients], out=gradient)
        average(self._peers, gradient, (mine.stop - mine.start) / num_rows)
        gradient.addcmul_(self._decay, self._weights.detach())
        self._optimizer.step()

    def _loss_of_all(self, rows: Tensor) -> Tensor:
        """Summed over the networks, so that each learns as if it were alone."""
        x, y, terminated = torch.split(rows, list(self._sizes), dim=2)
        mean, log_variance, end = self._nets(x)
        loss = gaussian_loss(mean, log_variance, y).sum()
        loss = loss + BOUNDS_PENALTY * (self._nets.highest.sum() - self._nets.lowest.sum())
        if end.shape[2]:
            loss = loss + functional.binary_cross_entropy_with_logits(end, terminated) * len(end)
        return loss

    @torch.no_grad()
    def _holdout_error(self) -> Tensor:
        """Mean squared error of each network: the geometric mean over the targets.

        The plain mean would speak of the one that is hardest to predict and stop training while the others still
        gain: of five numbers of InvertedPendulum, the reward made up nine tenths of it.
        """
        num_rows = len(self._held_out)
        x, y, _ = torch.split(self._held_out[portion(self._peers, num_rows)], list(self._sizes), dim=1)
        mean, _, _ = self._nets(x.expand(len(self._nets.lowest), *x.shape))
        squares = (mean - y).square()
        errors = squares.mean(dim=1) if self._peers.count == 1 else squares.sum(dim=1) / num_rows
        self._peers.sum(errors)
        error: Tensor = errors.clamp(min=SMALLEST_ERROR).log().mean(dim=1).exp()
        return error

    def metrics(self) -> Metrics:
        return {"dynamics_updates": float(self.num_updates)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "nets": self._nets.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._nets.load_state_dict(state["nets"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.generator.set_state(state["generator"].cpu())
        self.num_updates = int(state["num_updates"])
