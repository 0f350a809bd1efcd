"""How PPO takes a gradient step: by torch's autograd, or in numpy with gradients written out (the fast learner)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from freerun.algorithms.learners.shared_update import average_over_learners_
from freerun.algorithms.policies.action_heads import LOG_SQRT_2PI, mask_logits
from freerun.algorithms.policies.networks import ActorCritic, step_if_finite
from freerun.algorithms.policies.numpy_mlp import FlatAdam, NumpyMLP, layers_of
from freerun.algorithms.ppo.objective import ADVANTAGE_EPSILON, PPOLosses, ppo_losses
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TrainingBatch
from freerun.core import Array, FloatArray, LearnerGroup


class GradientSteps(Protocol):
    """The gradient steps of one update, one minibatch after another."""

    def begin(self, config: PPOConfig, batch: TrainingBatch) -> None:
        """Start an update on these rows."""
        ...

    def compute(self, rows: Tensor, advantage_of_all: Tensor | None) -> Tensor:
        """Compute the losses of a minibatch; return log(pi / pi_proximal) of its rows.

        Where other learners have some of the minibatch's rows, `advantage_of_all` holds the advantages of all rows.
        """
        ...

    def descend(self, share: float) -> None:
        """Take the step down the computed losses. `share` is the share of the minibatch's rows that is here."""
        ...

    def mean_losses(self) -> Tensor:
        """The policy loss and the value loss, averaged over the steps taken; NaN if there was none."""
        ...


class ProximalTerm:
    """The proximal term of FedProx (Li et al. 2018), mu / 2 · |w - w_0|²: it keeps weights near some others."""

    def __init__(self, weights: nn.Parameter):
        self._weights = weights.detach()
        self._anchor = self._weights.clone()
        self._strength = 0.0

    def set(self, strength: float) -> None:
        """Stay near the weights of now, by this strength; 0 sets the weights free."""
        self._anchor.copy_(self._weights)
        self._strength = strength

    @property
    def is_set(self) -> bool:
        return bool(self._strength)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the gradient of the term, mu · (w - w_0)."""
        if self._strength:  # without it, not even a zero of the other sign may be added
            gradient.add_(self._weights - self._anchor, alpha=self._strength)


class AutogradSteps:
    """Torch computes the gradients: the reference, for any network and any device."""

    def __init__(
        self,
        net: ActorCritic,
        weights: nn.Parameter,
        optimizer: torch.optim.Adam,
        group: LearnerGroup,
        num_bad: Tensor,
        proximal: ProximalTerm,
    ):
        self._net = net
        self._weights = weights
        self._optimizer = optimizer
        self._group = group
        self._num_bad_gradients = num_bad
        self._proximal = proximal

    def begin(self, config: PPOConfig, batch: TrainingBatch) -> None:
        self._config, self._batch = config, batch
        self._step_losses: list[Tensor] = []

    def compute(self, rows: Tensor, advantage_of_all: Tensor | None) -> Tensor:
        self._losses = ppo_losses(self._net, self._config, self._batch.select(rows), advantage_of_all)
        return self._losses.log_ratio

    def descend(self, share: float) -> None:
        self.descend_loss(self._config, self._losses, share)
        self._step_losses.append(share * torch.stack([self._losses.policy_loss, self._losses.value_loss]))

    def descend_loss(
        self, config: PPOConfig, losses: PPOLosses, share: float = 1.0, is_skipped: Tensor | None = None
    ) -> None:
        """Take a step down the losses, unless the device finds `is_skipped` to be true."""
        gradient = self._weights.grad
        assert gradient is not None
        # In place and not set to None: the gradients of all layers are views of this buffer.
        gradient.zero_()
        losses.total.backward()  # type: ignore[no-untyped-call]
        average_over_learners_(self._group, gradient, share)
        self._proximal.add_gradient(gradient)
        # Clip by norm: g <- g * min(1, max_grad_norm / (|g| + 1e-6))
        gradient *= (config.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
        step_if_finite(self._optimizer, gradient, self._num_bad_gradients, is_skipped)

    def mean_losses(self) -> Tensor:
        if not self._step_losses:
            return torch.full((2,), float("nan"), device=self._weights.device)
        return torch.stack(self._step_losses).mean(dim=0)


class Adam(Protocol):
    """Takes steps down the gradient in the flat buffer."""

    def step(self, max_norm: float) -> bool:
        """Clip the gradient by its norm and take a step. Return False, and change nothing, if it is not finite."""
        ...


class FlatDescent:
    """The step down gradients that are written out in the flat buffer, and the losses of the steps taken."""

    def __init__(self, weights: nn.Parameter, adam: Adam, group: LearnerGroup, num_bad: Tensor, proximal: ProximalTerm):
        self._weights, self._adam, self._group = weights, adam, group
        self._num_bad_gradients, self._proximal = num_bad, proximal

    def begin(self) -> None:
        self._loss_sum = np.zeros(2)
        self._num_steps = 0

    def step(self, share: float, max_grad_norm: float, policy_loss: float, value_loss: float) -> None:
        gradient = self._weights.grad
        assert gradient is not None
        average_over_learners_(self._group, gradient, share)
        self._proximal.add_gradient(gradient)
        if not self._adam.step(max_grad_norm):
            self._num_bad_gradients += 1
        self.count(1, share * policy_loss, share * value_loss)

    def count(self, num_steps: int, policy_loss: float, value_loss: float) -> None:
        """Count steps that were taken, with the sums of their losses."""
        self._loss_sum += (policy_loss, value_loss)
        self._num_steps += num_steps

    def mean_losses(self) -> Tensor:
        mean = self._loss_sum / self._num_steps if self._num_steps else np.full(2, math.nan)
        return torch.from_numpy(mean.astype(np.float32))


class FastSteps:
    """Gradients written out in numpy: for MLPs on a CPU, where they take a fraction of autograd's time.

    The losses are those of `objective.ppo_losses`, and a test compares the two ways, setting by setting.
    """

    def __init__(
        self,
        net: ActorCritic,
        weights: nn.Parameter,
        optimizer: torch.optim.Adam,
        group: LearnerGroup,
        num_bad: Tensor,
        proximal: ProximalTerm,
    ):
        self._descent = FlatDescent(weights, FlatAdam(weights, optimizer), group, num_bad, proximal)
        self._actor, self._critic = (NumpyMLP(layers_of(part), net.spec.activation) for part in (net.actor, net.critic))
        self._spec, self._seen_by_critic = net.spec, net.seen_by_critic
        self._head: GradientHead
        if net.spec.gaussian_size:
            assert net.log_std.grad is not None
            self._head = GaussianGradient(net.log_std.detach().numpy(), net.log_std.grad.numpy())
        else:
            self._head = CategoricalGradient(net.spec.categories)

    def begin(self, config: PPOConfig, batch: TrainingBatch) -> None:
        self._config = config
        self._columns = [column.numpy() for column in batch]
        self._descent.begin()

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is counted by `descend`
    def compute(self, rows: Tensor, advantage_of_all: Tensor | None) -> Tensor:
        config = self._config
        picked = rows.numpy()
        *columns, old_value = self._columns
        obs, action, proximal, weight, advantage, target = (column.take(picked, axis=0) for column in columns)
        seen_by_actor, seen_by_critic = obs, obs
        if self._spec.has_more_than_policy_sees:
            seen_by_actor, seen_by_critic = obs[:, : self._spec.obs_size], obs[:, self._seen_by_critic]
        output = self._actor.forward(seen_by_actor)
        if self._spec.has_mask:
            # A choice that is ruled out has probability 0, by which `CategoricalGradient` multiplies its gradient.
            mask_logits(output, obs)
        log_ratio: FloatArray = self._head.log_prob(output, action) - proximal

        # Advantage normalisation: (A - mean(A)) / (std(A) + eps), over the whole minibatch
        of_all = advantage if advantage_of_all is None else advantage_of_all.numpy()
        if config.normalizes_minibatches and len(of_all) > 1:
            mean = of_all.mean()
            centred = of_all - mean
            # numpy's own `std` takes several times as long as one product, with as few numbers as these.
            deviation = math.sqrt(np.dot(centred, centred) / (len(of_all) - 1))
            advantage = (advantage - mean) / np.float32(deviation + ADVANTAGE_EPSILON)

        # L = -mean(w * min(ratio * A, clip(ratio) * A)), so dL/dlog_ratio = -w * ratio * A / n where the first is the
        # smaller one, and 0 where the clipped one is.
        num_rows = max(1, len(picked))
        ratio = np.exp(log_ratio)
        objective = ratio * advantage
        clipped = np.clip(ratio, 1 - config.clip_range, 1 + config.clip_range) * advantage
        is_unclipped = objective <= clipped
        weight /= -num_rows
        policy_loss = np.dot(weight, np.minimum(objective, clipped))
        objective *= weight
        objective *= is_unclipped
        self._d_log_prob = objective

        # L = mean((V - target)^2), so dL/dV = 2 (V - target) / n
        value = self._critic.forward(seen_by_critic)[:, 0]
        error = value - target
        self._d_value = error * (2 * config.value_coef / num_rows)
        if config.value_clip is not None:
            # The larger one counts of (V - target)^2 and (V_old + clip(V - V_old) - target)^2. Beyond the limits the
            # slope of the second is 0; within them both are the same.
            old = old_value.take(picked)
            moved = value - old
            clipped_error = old + np.clip(moved, -config.value_clip, config.value_clip) - target
            is_held = (np.abs(moved) > config.value_clip) & (np.abs(clipped_error) > np.abs(error))
            self._d_value *= ~is_held
            error = np.where(is_held, clipped_error, error)
        self._losses = (policy_loss, np.dot(error, error) / num_rows)
        return torch.from_numpy(log_ratio)

    @np.errstate(over="ignore", invalid="ignore")
    def descend(self, share: float) -> None:
        num_rows = len(self._d_value)
        self._actor.backward(self._head.backward(self._d_log_prob, self._config.entropy_coef / max(1, num_rows)))
        self._critic.backward(self._d_value[:, None])
        self._descent.step(share, self._config.max_grad_norm, *self._losses)

    def mean_losses(self) -> Tensor:
        return self._descent.mean_losses()


class GradientHead(Protocol):
    """The log-probabilities and the entropy of a distribution, with their gradients."""

    def log_prob(self, output: FloatArray, action: Array) -> FloatArray:
        """Log-probabilities [B] of actions, given the actor's output. Keeps what `backward` needs."""
        ...

    def backward(self, d_log_prob: FloatArray, entropy_weight: float) -> FloatArray:
        """The gradient of sum(d_log_prob * log_prob) - entropy_weight * sum(entropy) with respect to the output."""
        ...


class CategoryPart(NamedTuple):
    """One of several independent categories, in the last minibatch."""

    log_probs: FloatArray
    probs: FloatArray
    picked: Array
    """The places of the chosen actions in the flattened array."""


class CategoricalGradient:
    """Independent categorical distributions, whose logits stand side by side."""

    def __init__(self, categories: Sequence[int]):
        ends = np.cumsum(categories).tolist()
        self._slices = [slice(end - size, end) for size, end in zip(categories, ends, strict=True)]

    def log_prob(self, output: FloatArray, action: Array) -> FloatArray:
        num_rows = len(output)
        columns = action.reshape(num_rows, len(self._slices))  # also where another learner has all rows
        total = np.zeros(num_rows, np.float32)
        self._parts = []
        for column, part in enumerate(self._slices):
            # log softmax: x - max - log(sum_i exp(x_i - max)); without the maximum exp could overflow
            log_probs = output[:, part] - np.maximum.reduce(output[:, part], axis=1, keepdims=True)
            probs = np.exp(log_probs)
            normalizer = np.add.reduce(probs, axis=1, keepdims=True)
            probs /= normalizer
            log_probs -= np.log(normalizer)
            picked = np.arange(0, log_probs.size, log_probs.shape[1]) + columns[:, column]
            total += log_probs.reshape(-1)[picked]
            self._parts.append(CategoryPart(log_probs, probs, picked))
        return total

    def backward(self, d_log_prob: FloatArray, entropy_weight: float) -> FloatArray:
        d_column = d_log_prob[:, None]
        gradients = []
        for log_probs, probs, picked in self._parts:
            # d log p_a / d x_j = [j = a] - p_j,  and with H = -sum_i p_i log p_i:  dH / d x_j = -p_j (log p_j + H)
            if entropy_weight:
                entropy = -np.einsum("ij,ij->i", probs, log_probs)[:, None]
                gradient = log_probs
                gradient += entropy
                gradient *= entropy_weight
                gradient -= d_column
                gradient *= probs
            else:
                gradient = np.multiply(probs, -d_column, out=log_probs)
            gradient.reshape(-1)[picked] += d_log_prob
            gradients.append(gradient)
        return gradients[0] if len(gradients) == 1 else np.concatenate(gradients, axis=1)


class GaussianGradient:
    """A diagonal Gaussian whose mean is the output; log(std) is a weight of its own."""

    def __init__(self, log_std: FloatArray, log_std_gradient: FloatArray):
        self._log_std, self._log_std_gradient = log_std, log_std_gradient

    def log_prob(self, output: FloatArray, action: Array) -> FloatArray:
        # log N(a; mean, std) = -0.5 * sum(noise^2) - sum(log std + log sqrt(2 pi)), with noise = (a - mean) / std
        self._inverse_std = np.exp(-self._log_std)
        self._noise = (action.reshape(output.shape) - output) * self._inverse_std
        constant = self._log_std.sum() + LOG_SQRT_2PI * len(self._log_std)
        log_prob: FloatArray = -0.5 * np.einsum("ij,ij->i", self._noise, self._noise) - constant
        return log_prob

    def backward(self, d_log_prob: FloatArray, entropy_weight: float) -> FloatArray:
        noise, num_rows = self._noise, len(d_log_prob)
        # d log N / d log std = noise^2 - 1,  dH / d log std = 1,  d log N / d mean = noise / std
        np.dot(d_log_prob, noise * noise - 1.0, out=self._log_std_gradient)
        self._log_std_gradient -= entropy_weight * num_rows
        gradient: FloatArray = noise * self._inverse_std
        gradient *= d_log_prob[:, None]
        return gradient
