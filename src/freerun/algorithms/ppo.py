"""Proximal policy optimisation, also on data that is a few updates old (the decoupled objective)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.algorithms.actor import NORMALIZED_LIMIT, ActorSpec, MLPActor
from freerun.algorithms.batch import Batch, join, nothing
from freerun.algorithms.lessons import Grid, Lesson, lesson_of_batch, lesson_of_grid
from freerun.algorithms.networks import ActorCritic, heal, share_one_buffer
from freerun.algorithms.normalization import RunningMoments
from freerun.algorithms.ppo_config import PPOConfig
from freerun.algorithms.returns import approx_kl, clipped_objective
from freerun.algorithms.sharing import JoinedRows, Size, average, first_episode, mean
from freerun.algorithms.torch_actor import TorchActor, build
from freerun.capture import Recorded, Repeated, fused
from freerun.core import (
    Acceleration,
    Alone,
    AnySegment,
    Demand,
    EnvSpec,
    Metrics,
    Peers,
    Policy,
    TensorSegment,
    UserError,
    callable_name,
)

DEFAULT_STEPS_PER_UPDATE = 2048
ENTROPY_ROWS = 4096
"""Enough to say how much the policy still tries out."""


class Desk(NamedTuple):
    """Where a recorded gradient step finds its lesson: memory that stays in place."""

    lesson: Lesson
    order: Tensor
    """The rows of every minibatch, [gradient steps, rows]."""
    cursor: Tensor
    """The next one."""
    sums: Tensor


def _acceleration(config: PPOConfig, device: torch.device) -> Acceleration:
    """Fusing kernels, too, takes half a minute before the first update: only where it is asked for."""
    if device.type != "cuda" or config.network is not None:
        return "none"
    return "graph" if config.acceleration == "auto" else config.acceleration


class PPO:
    """Learns from whole segments; values and advantages are computed here, with the newest weights.

    Several learners take each gradient step together, from the minibatch that one would have drawn of all segments:
    each has its own of them, and thus some of the minibatch's rows.
    """

    def __init__(
        self, env: EnvSpec, config: PPOConfig, seed: int, device: str, deterministic: bool, peers: Peers | None = None
    ):
        self.config = config
        self._peers = peers or Alone()
        network = config.network
        hidden_sizes = config.hidden_sizes if network is None else ()
        spec = ActorSpec.of(env, hidden_sizes, config.activation, config.normalize_obs)
        scalar_actions = isinstance(env.action_space, spaces.Discrete)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._net = ActorCritic(spec, functools.partial(build, network, env) if network else None)
            if spec.gaussian_size:
                self._net.log_std.data.fill_(config.initial_log_std)
        if network is None:
            self.policy: Policy = MLPActor(spec, scalar_actions, batch_invariant=deterministic)
        else:
            name = callable_name(network)
            self.policy = TorchActor(spec, self._net.actor, name, scalar_actions, batch_invariant=deterministic)
        self._device = torch.device(device)
        self._net.to(self._device)
        self._net.export(self.policy)
        self._shuffle = torch.Generator(self._device).manual_seed(seed)
        self._weights = share_one_buffer(self._net)
        self._acceleration = _acceleration(config, self._device)
        if self._peers.count > 1 and self._acceleration != "none":
            raise UserError("several learners cannot record their gradient steps: give --acceleration none")
        captures = self._acceleration != "none"
        # A recorded gradient step must find the learning rate on the device.
        learning_rate = torch.tensor(config.learning_rate, device=self._device) if captures else config.learning_rate
        self._optimizer = torch.optim.Adam([self._weights], learning_rate, eps=1e-5, fused=True, capturable=captures)
        self._desk: Desk | None = None
        self._prepare = Recorded(self._lesson_and_value, self._device, self._acceleration)
        self._fused_losses = fused(self._losses_of_rows, self._acceleration)
        self._num_bad = torch.zeros(1, device=self._device)  # gradients that were not finite
        self._obs_moments = RunningMoments((spec.obs_size,))
        self._return_moments = RunningMoments()
        self._segments: list[AnySegment] = []
        self._sizes: list[Size] = []  # of the segments of all learners
        self._nothing = nothing(env)

    def demand(self) -> Demand:
        if self.config.episodes_per_update is not None:
            return Demand(episodes=max(0, self.config.episodes_per_update - len(self._sizes)))
        steps = self.config.steps_per_update or DEFAULT_STEPS_PER_UPDATE
        return Demand(steps=max(0, steps - sum(size.num_steps for size in self._sizes)), next_steps=steps)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._segments.extend(segments)
        mine = [Size(first_episode(segment), self._peers.index, segment.num_steps) for segment in segments]
        self._sizes.extend(size for sizes in self._peers.gather(mine) for size in sizes)

    def update(self, version: int, progress: float) -> Metrics:
        segments, joined = self._segments, JoinedRows(self._peers, self._sizes, self._device)
        self._segments, self._sizes = [], []
        if self.config.anneal_learning_rate:
            self._set_learning_rate(self.config.learning_rate * (1 - progress))
        obs, lesson, value = self._read(segments, version)
        metrics = self._learn(lesson, value, joined)
        if self.config.normalize_obs:
            # Only now: acting and learning of one version must see the same statistics, or the ratio is not 1.
            self._update_obs_moments(obs)
        self._net.export(self.policy)
        return metrics

    def _read(self, segments: Sequence[AnySegment], version: int) -> tuple[Tensor, Lesson, Tensor]:
        """The observations as they came, what to learn, and the values before."""
        tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
        if tensors and not self.config.normalize_reward:
            grid = Grid.of(tensors, self._device, version)
            *lesson, value = self._prepare(*grid)
            return grid.obs.flatten(0, 1).flatten(1), Lesson(*lesson), value
        batch = join(segments or [self._nothing], self._device)
        return batch.obs, *lesson_of_batch(self._net, self.config, batch, self._scaled_reward(batch), version)

    def _lesson_and_value(self, *grid: Tensor) -> tuple[Tensor, ...]:
        lesson, value = lesson_of_grid(self._net, self.config, Grid(*grid))
        return *lesson, value

    def _learn(self, lesson: Lesson, value: Tensor, joined: JoinedRows) -> Metrics:
        net = self._net
        advantage_of_all, target_of_all, value_of_all = joined.join(
            torch.stack([lesson.advantage, lesson.target, value])
        )
        num_rows = len(lesson.obs)
        if self._can_capture(num_rows):
            measured, num_gradient_steps = self._replay(lesson)
        else:
            measured, num_gradient_steps = self._study(lesson, joined, advantage_of_all)
        with torch.no_grad():
            entropy = mean(net.entropy(net.actor(lesson.obs[:ENTROPY_ROWS])))
            average(self._peers, entropy, num_rows / joined.total)
            explained = 1 - (target_of_all - value_of_all).var() / (target_of_all.var() + 1e-8)
        policy_loss, value_loss, kl, clipped, entropy_now, explained_variance, num_bad = torch.cat(
            [measured, torch.stack([entropy, explained]), self._num_bad]
        ).tolist()
        self._num_bad.zero_()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy_now,
            "approx_kl": kl,
            "clip_fraction": clipped,
            "explained_variance": explained_variance,
            "num_gradient_steps": float(num_gradient_steps),
            "bad_gradients": num_bad,
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
        }

    def _study(self, lesson: Lesson, joined: JoinedRows, advantage_of_all: Tensor) -> tuple[Tensor, int]:
        """Gradient steps one by one: the means of what they measured, and how many there were."""
        log_ratios, losses = [], []
        target_kl = self.config.target_kl
        num_rows_seen = 0
        for rows_of_all in self._minibatches(joined.total):
            rows = joined.here(rows_of_all)
            share = len(rows) / len(rows_of_all)
            num_rows_seen += len(rows_of_all)
            scale = None if share == 1 else advantage_of_all[rows_of_all]
            mine = Lesson(*(part[rows] for part in lesson))
            loss, policy_loss, value_loss, log_ratio = self._losses(*mine, advantage_of_all=scale)
            log_ratios.append(log_ratio)
            if target_kl is not None and self._moved(log_ratio, share)[0] > 1.5 * target_kl:
                break
            self._step(loss, share)
            losses.append(share * torch.stack([policy_loss, value_loss]))
        mean_losses = torch.stack(losses).mean(dim=0) if losses else torch.full((2,), float("nan"), device=self._device)
        self._peers.sum(mean_losses)
        every_log_ratio = torch.cat(log_ratios)
        return torch.cat([mean_losses, self._moved(every_log_ratio, len(every_log_ratio) / num_rows_seen)]), len(losses)

    def _losses(
        self,
        obs: Tensor,
        action: Tensor,
        proximal: Tensor,
        weight: Tensor,
        advantage: Tensor,
        target: Tensor,
        advantage_of_all: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a minibatch: what to descend, its two parts, and how far the policy has moved.

        Where other learners have some of its rows, advantages are scaled by those of all.
        """
        config, net = self.config, self._net
        head = net.actor(obs)
        log_ratio = net.log_prob(head, action) - proximal
        of_all = advantage if advantage_of_all is None else advantage_of_all
        if config.normalize_advantage and len(of_all) > 1:
            advantage = (advantage - of_all.mean()) / (of_all.std() + 1e-8)
        objective = clipped_objective(log_ratio.exp(), advantage, config.clip_range)
        policy_loss = -mean(weight * objective)
        value_loss = mean((net.value(obs) - target).square())
        loss = policy_loss + config.value_coef * value_loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * mean(net.entropy(head))
        return loss, policy_loss.detach(), value_loss.detach(), log_ratio.detach()

    def _moved(self, log_ratio: Tensor, share: float = 1.0) -> Tensor:
        """How far from the policy that the update began with, and the share of actions where that was too far."""
        if len(log_ratio):
            clipped = ((log_ratio.exp() - 1).abs() > self.config.clip_range).float().mean()
            moved = torch.stack([approx_kl(log_ratio), clipped])
        else:
            moved = torch.zeros(2, device=self._device)
        average(self._peers, moved, share)
        return moved

    # ------------------------------------------------------------------------------------------ as a CUDA graph

    def _can_capture(self, num_rows: int) -> bool:
        """A graph has one shape, and cannot stop early."""
        even = num_rows % self._num_minibatches(num_rows) == 0
        return self._acceleration != "none" and even and self.config.target_kl is None

    def _replay(self, lesson: Lesson) -> tuple[Tensor, int]:
        """The same as `_study`, each gradient step launched as one."""
        order = torch.stack(list(self._minibatches(len(lesson.obs))))
        if self._desk is None or self._desk.order.shape != order.shape:
            self._desk = Desk(
                lesson,
                order,
                torch.zeros(1, dtype=torch.int64, device=self._device),
                torch.zeros(4, device=self._device),
            )
            self._gradient_step = Repeated(self._step_at_desk, self._device, (), self._acceleration)
        desk = self._desk
        for kept, part in zip((*desk.lesson, desk.order), (*lesson, order), strict=True):
            if kept is not part:
                kept.copy_(part)
        desk.cursor.zero_()
        desk.sums.zero_()
        self._gradient_step(len(order))
        return desk.sums / len(order), len(order)

    def _losses_of_rows(self, rows: Tensor, *lesson: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._losses(*(part[rows] for part in lesson))

    def _step_at_desk(self) -> None:
        """The next minibatch: which one it is, only the device knows."""
        assert self._desk is not None
        lesson, order, cursor, sums = self._desk
        rows = order.index_select(0, cursor).squeeze(0)
        loss, policy_loss, value_loss, log_ratio = self._fused_losses(rows, *lesson)
        self._step(loss)
        sums += torch.cat([torch.stack([policy_loss, value_loss]), self._moved(log_ratio)])
        cursor += 1

    def _step(self, loss: Tensor, share: float = 1.0) -> None:
        gradient = self._weights.grad
        assert gradient is not None
        gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        average(self._peers, gradient, share)
        heal(gradient, self._num_bad)
        gradient *= (self.config.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
        self._optimizer.step()

    def _scaled_reward(self, batch: Batch) -> Tensor:
        if not self.config.normalize_reward:
            return batch.reward
        reward, carry = batch.reward[batch.rows], self.config.gamma * ~batch.ended[batch.rows]
        discounted = torch.empty_like(reward)
        running = torch.zeros_like(reward[:1].sum(dim=0))
        for step in range(len(reward)):
            running = running + reward[step]
            discounted[step] = running
            running = running * carry[step]
        self._return_moments.update(discounted[batch.mask], self._peers)
        scaled = batch.reward * float(self._return_moments.scale)
        return scaled.clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def _num_minibatches(self, num_rows: int) -> int:
        return max(1, round(num_rows / self.config.minibatch_size))

    def _minibatches(self, num_rows: int) -> Iterator[Tensor]:
        for _ in range(self.config.num_epochs):
            order = torch.randperm(num_rows, generator=self._shuffle, device=self._device)
            yield from order.chunk(self._num_minibatches(num_rows))

    def _update_obs_moments(self, obs: Tensor) -> None:
        self._obs_moments.update(obs, self._peers)
        self._net.obs_mean.copy_(torch.from_numpy(self._obs_moments.mean))
        self._net.obs_scale.copy_(torch.from_numpy(self._obs_moments.scale))

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self._net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "obs_moments": self._obs_moments.state_dict(),
            "return_moments": self._return_moments.state_dict(),
            "shuffle": self._shuffle.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps the tensors it is given
        self._obs_moments.load_state_dict(state["obs_moments"])
        self._return_moments.load_state_dict(state["return_moments"])
        self._shuffle.set_state(state["shuffle"].cpu())
        self._net.export(self.policy)
