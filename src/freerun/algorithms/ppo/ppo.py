"""Proximal policy optimisation, also on data that is a few updates old (the decoupled objective, or V-trace)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from freerun.algorithms.learners.fast_learner import kernel_for
from freerun.algorithms.learners.shared_update import (
    JoinedRows,
    SegmentSize,
    average_over_learners_,
    first_episode,
    mean_or_zero,
)
from freerun.algorithms.learners.sliced_adam import SlicedAdam
from freerun.algorithms.policies.networks import flatten_parameters
from freerun.algorithms.policies.running_moments import RunningMoments
from freerun.algorithms.ppo.compiled_steps import CompiledSteps
from freerun.algorithms.ppo.gradient_steps import AutogradSteps, FastSteps, GradientSteps, ProximalTerm
from freerun.algorithms.ppo.graphed_epochs import GraphedEpochs, acceleration_of
from freerun.algorithms.ppo.minibatches import Minibatches
from freerun.algorithms.ppo.objective import (
    PPOLosses,
    adapted_learning_rate,
    normalized_advantage,
    policy_change,
    ppo_losses,
)
from freerun.algorithms.ppo.ppo_config import (
    PPOConfig,
    computed_by,
    learner_note,
    scaled_defaults,
    with_network,
    with_sizes,
)
from freerun.algorithms.ppo.ppo_networks import make_networks
from freerun.algorithms.ppo.reward_scale import RewardScale, scaled_reward
from freerun.algorithms.ppo.sequences import SequenceSteps
from freerun.algorithms.ppo.training_batch import (
    Forward,
    TensorGrid,
    TrainingBatch,
    empty_segment,
    flatten_segments,
    prepare_flat_batch,
    prepare_grid,
)
from freerun.core import (
    AlgorithmTraits,
    AnySegment,
    Demand,
    EnvSpec,
    LearnerGroup,
    Metrics,
    SingleLearner,
    TensorSegment,
    UserError,
)
from freerun.cuda_graphs import GraphedFunction

ENTROPY_ROWS = 4096
"""The entropy metric is measured on this many rows, which is precise enough."""
ENTROPY_ROWS_OF_IMAGES = 256
"""The same for networks that are no MLPs: on a CPU, a CNN takes a quarter of a millisecond for a row."""
MAX_KL_FACTOR = 1.5
"""An update stops once the KL divergence exceeds `target_kl` by this factor, as in OpenAI's Spinning Up."""


class PPO:
    """Learns from whole segments. Values and advantages are computed here, with the newest weights.

    Several learners take each gradient step together, on the minibatch that a single learner would have drawn from the
    segments of all. Each learner has its own segments, and thus some of the minibatch's rows.
    """

    traits = AlgorithmTraits(
        on_policy=True,
        default_max_lag=1,
        counts_episodes=True,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        has_acceleration=True,
        has_network=True,
        has_critic_group=True,
        has_action_mask=True,
        has_proximal_term=True,
        critic_parts=("net/critic",),
        code_settings=("network",),
        minibatch_setting="minibatch_size",
        update_ratio_setting="num_epochs",
        larger_minibatch_is_faster=True,
        computed_by=computed_by,
        learner_note=learner_note,
    )
    learned: ClassVar[tuple[str, ...]] = ("net", "obs_moments", "reward_scale/moments")

    def __init__(
        self,
        env: EnvSpec,
        config: PPOConfig,
        seed: int,
        device: str,
        deterministic: bool,
        learner_group: LearnerGroup | None = None,
    ):
        self.config = config = with_network(with_sizes(config), env)
        self._learner_group = learner_group or SingleLearner()
        self._device = torch.device(device)
        made_by = computed_by(config, device)
        made = make_networks(env, config, seed, deterministic, self._device)
        self.net, self.policy, self._is_normalized, self._measured = made
        self._has_mlp = config.network is None
        self._shuffle = torch.Generator(self._device).manual_seed(seed)
        self._weights = flatten_parameters(self.net)
        self._acceleration = acceleration_of(config, self.net, self._device)
        is_captured = self._acceleration != "none"
        if self._learner_group.count > 1 and is_captured:
            raise UserError("several learners cannot record their gradient steps: give --acceleration none")
        assert config.learning_rate is not None  # `with_sizes`
        # A captured gradient step must find the learning rate on the device, or it would never see another one.
        learning_rate = torch.tensor(config.learning_rate, device=self._device) if is_captured else config.learning_rate
        # eps is 1e-5 and not torch's 1e-8, as in OpenAI's baselines.
        self._optimizer = SlicedAdam(self._weights, learning_rate, eps=1e-5)
        self._num_bad_gradients = torch.zeros(1, device=self._device)
        self._proximal = ProximalTerm(self._weights)
        parts = (self.net, self._weights, self._optimizer, self._learner_group, self._num_bad_gradients)
        self._memory_steps = SequenceSteps(*parts, self._proximal) if config.has_memory else None
        autograd = self._memory_steps or AutogradSteps(*parts, self._proximal)
        self._gradient_steps: GradientSteps = autograd
        self._forward: Forward = self.net
        if made_by == "kernel" and (kernel := kernel_for(config.learner, config.hidden_sizes)) is not None:
            self._gradient_steps = compiled = CompiledSteps(*parts, self._proximal, kernel)
            self._forward = compiled.forward
        elif made_by == "numpy":
            self._gradient_steps = FastSteps(*parts, self._proximal)

        def descend(losses: PPOLosses, kl: Tensor, tells_of_step: Tensor, is_skipped: Tensor | None) -> None:
            self._adapt_learning_rate(kl, tells_of_step)
            autograd.descend_loss(self.config, losses, is_skipped=is_skipped)

        goes_too_far = None if config.target_kl is None else self._goes_too_far
        self._graphed_epochs = GraphedEpochs(
            self._losses, self._policy_change, goes_too_far, descend, self._device, self._acceleration
        )
        self._graphed_preparation = GraphedFunction(self._prepare_grid, self._device, self._acceleration)
        self._obs_moments = RunningMoments(self.net.obs_mean[self._measured].shape)
        self.reward_scale = RewardScale(config.gamma)
        self._segments: list[AnySegment] = []
        self._sizes: list[SegmentSize] = []  # of the segments of all learners
        self._empty_segment = empty_segment(env)

    def reconfigure(self, config: PPOConfig) -> None:
        self.config = config

    def stay_near(self, strength: float) -> None:
        """Pull the weights back to those of now at every gradient step, as FedProx does."""
        self._proximal.set(strength)
        self._graphed_epochs.forget()  # a captured step would keep the old strength

    # ------------------------------------------------------------------------------------------ collecting

    def demand(self) -> Demand:
        if self.config.episodes_per_update is not None:
            return Demand(episodes=max(0, self.config.episodes_per_update - len(self._sizes)))
        steps = self.config.steps_per_update
        assert steps is not None  # `with_sizes`
        return Demand(steps=max(0, steps - sum(size.num_steps for size in self._sizes)), next_steps=steps)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        self._segments.extend(segments)
        index = self._learner_group.index
        mine = [SegmentSize(first_episode(segment), index, segment.num_steps) for segment in segments]
        # Every learner gathers the same list, so all demand the same and update together.
        self._sizes.extend(size for sizes in self._learner_group.gather(mine) for size in sizes)

    # ------------------------------------------------------------------------------------------ the update

    def update(self, version: int, progress: float) -> Metrics:
        segments, joined = self._segments, JoinedRows(self._learner_group, self._sizes, self._device)
        self._segments, self._sizes = [], []
        if self.config.anneal_learning_rate:
            assert self.config.learning_rate is not None  # `with_sizes`
            # Linear annealing: lr = lr_0 * (1 - progress), where progress rises from 0 to 1 over the run.
            self._optimizer.set_learning_rate(self.config.learning_rate * (1 - progress))

        # Values, advantages and value targets with the weights of now.
        obs, batch = self._prepare(segments, version)
        advantage_of_all, target_of_all, value_of_all = joined.join(
            torch.stack([batch.advantage, batch.value_target, batch.value])
        )
        if self.config.normalizes_update:
            batch = batch._replace(advantage=normalized_advantage(batch.advantage, advantage_of_all))
        # Several epochs of minibatch gradient steps.
        minibatches = self._minibatches(joined.total)
        if minibatches.is_captured and minibatches.are_even:
            measured = self._graphed_epochs.run(batch, self._draw(minibatches, joined))
        else:
            measured = self._run_epochs(batch, joined, advantage_of_all, self._draw(minibatches, joined))

        metrics = self._metrics(measured, batch, joined.total, target_of_all, value_of_all)
        if self.net.spec.normalize_obs:
            # Only now: acting and learning of one version must see the same statistics, or the ratio would not be 1.
            self._obs_moments.update(obs[:, self._measured], self._learner_group)
            self._apply_obs_moments()
        self.net.export(self.policy)
        return metrics

    def _prepare(self, segments: Sequence[AnySegment], version: int) -> tuple[Tensor, TrainingBatch]:
        """The observations before normalisation, and the training batch."""
        tensors = [segment for segment in segments if isinstance(segment, TensorSegment)]
        if tensors and self._memory_steps is None:
            # A grid needs no data on the host, so that its computation can be captured too.
            grid = TensorGrid.of(tensors, self._device, version)
            if self.config.normalize_reward:
                factor = self.reward_scale(tensors, grid.reward, grid.ended, self._learner_group)
                grid = grid._replace(reward=scaled_reward(grid.reward, factor))
            return grid.obs.flatten(0, 1).flatten(1), TrainingBatch(*self._graphed_preparation(*grid))
        segments = segments or [self._empty_segment]
        flat = flatten_segments(segments, self._device, keeps_bytes=not self._has_mlp)
        reward = flat.reward
        if self.config.normalize_reward:
            # On the host, as the advantages are: see `prepare_flat_batch`.
            grid_reward, grid_ended = flat.reward[flat.rows].cpu(), flat.ended[flat.rows].cpu()
            factor = self.reward_scale(segments, grid_reward, grid_ended, self._learner_group, flat.mask.cpu())
            reward = scaled_reward(reward, factor)
        steps = self._memory_steps
        remember = None if steps is None else steps.arrange(segments, self.config)
        return flat.obs, prepare_flat_batch(self.net, self.config, flat, reward, version, remember, self._forward)

    def _prepare_grid(self, *grid: Tensor) -> TrainingBatch:
        return prepare_grid(self.net, self.config, TensorGrid(*grid))

    def _minibatches(self, num_rows: int) -> Minibatches:
        assert self.config.minibatch_size is not None  # `with_sizes`
        return Minibatches(num_rows, self.config.minibatch_size, self._acceleration != "none")

    def _draw(self, minibatches: Minibatches, joined: JoinedRows) -> list[Tensor]:
        """All are drawn even if the update ends early, so the next one draws the same as after a recorded update."""
        assert self.config.num_epochs is not None  # `with_sizes`
        steps, size = self._memory_steps, minibatches.minibatch_size
        draw = minibatches.draw if steps is None else steps.draws(size, joined)
        return list(draw(self.config.num_epochs, self._shuffle))

    def _run_epochs(
        self, batch: TrainingBatch, joined: JoinedRows, advantage_of_all: Tensor, minibatches: Sequence[Tensor]
    ) -> Tensor:
        """Take the gradient steps one by one. Returns the means of what they measured, and their number.

        The means are of policy loss, value loss, approximate KL divergence and clipped fraction.
        """
        config, steps = self.config, self._gradient_steps
        steps.begin(config, batch)
        watches_kl = config.target_kl is not None or config.desired_kl is not None
        is_alone = self._learner_group.count == 1 and not self._proximal.is_set
        if isinstance(steps, CompiledSteps) and is_alone and not watches_kl:
            log_ratio = steps.descend_all(minibatches)
            return self._means(log_ratio, len(log_ratio), len(minibatches))
        log_ratios = []
        num_rows = num_steps = 0
        for rows_of_all in minibatches:
            rows = joined.local(rows_of_all)
            share = len(rows) / len(rows_of_all)
            num_rows += len(rows_of_all)
            log_ratio = steps.compute(rows, None if share == 1 else advantage_of_all[rows_of_all])
            log_ratios.append(log_ratio)
            if watches_kl:
                # Before the step: the minibatch that shows too large a change must not move the policy further.
                kl = self._policy_change(log_ratio, share)[0]
                if config.target_kl is not None and self._goes_too_far(kl):
                    break
                if num_steps:
                    self._adapt_learning_rate(kl)
            steps.descend(share)
            num_steps += 1
        return self._means(torch.cat(log_ratios), num_rows, num_steps)

    def _means(self, log_ratio: Tensor, num_rows: int, num_steps: int) -> Tensor:
        """What `_run_epochs` returns, given what was measured on this learner's share of the rows."""
        mean_losses = self._gradient_steps.mean_losses()
        self._learner_group.sum(mean_losses)
        change = self._policy_change(log_ratio, len(log_ratio) / num_rows)
        return torch.cat([mean_losses, change, torch.tensor([float(num_steps)], device=self._device)])

    def _losses(self, minibatch: TrainingBatch) -> PPOLosses:
        return ppo_losses(self.net, self.config, minibatch)

    def _policy_change(self, log_ratio: Tensor, share: float = 1.0) -> Tensor:
        change = policy_change(log_ratio, self.config.clip_range)
        average_over_learners_(self._learner_group, change, share)
        return change

    @torch.no_grad()
    def _metrics(
        self,
        measured: Tensor,
        batch: TrainingBatch,
        total_rows: int,
        target_of_all: Tensor,
        value_of_all: Tensor,
    ) -> Metrics:
        num_rows = ENTROPY_ROWS if self._has_mlp else ENTROPY_ROWS_OF_IMAGES
        seen = batch.obs[:num_rows]
        if self._memory_steps is not None:
            seen = self._memory_steps.seen(torch.arange(len(seen), device=self._device))
        # The entropy of a Gaussian does not depend on its mean, which need not be computed.
        head = seen if self.net.spec.gaussian_size else self._forward.head(seen)
        entropy = mean_or_zero(self.net.entropy(head))
        average_over_learners_(self._learner_group, entropy, len(batch.obs) / total_rows)
        # Explained variance: 1 - Var(target - V) / Var(target). Without Bessel's correction, which cancels out: the
        # last update of a run may have a single step.
        unexplained = (target_of_all - value_of_all).var(correction=0)
        explained = 1 - unexplained / (target_of_all.var(correction=0) + 1e-8)
        # One transfer from the device for all numbers.
        policy_loss, value_loss, kl, clip_fraction, num_steps, entropy_now, explained_variance, num_bad = torch.cat(
            [measured, torch.stack([entropy, explained]), self._num_bad_gradients]
        ).tolist()
        self._num_bad_gradients.zero_()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy_now,
            "approx_kl": kl,
            "clip_fraction": clip_fraction,
            "explained_variance": explained_variance,
            "num_gradient_steps": num_steps,
            "bad_gradients": num_bad,
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
        }

    def _apply_obs_moments(self) -> None:
        """Have the networks normalise by the moments of now. Those of pixels are not measured, but known."""
        measured = self._measured
        mean, scale = (torch.from_numpy(moment) for moment in (self._obs_moments.mean, self._obs_moments.scale))
        is_normalized, net = self._is_normalized[measured], self.net
        net.obs_mean[measured] = torch.where(is_normalized, mean, 0.0).to(net.obs_mean)
        net.obs_scale[measured] = torch.where(is_normalized, scale, 1.0).to(net.obs_scale)

    def _goes_too_far(self, kl: Tensor) -> Tensor:
        assert self.config.target_kl is not None
        return kl > MAX_KL_FACTOR * self.config.target_kl

    def _adapt_learning_rate(self, kl: Tensor, applies: Tensor | None = None) -> None:
        """Move the learning rate by how far the policy has moved in this update (--desired-kl), where it `applies`."""
        if self.config.desired_kl is None:
            return
        for group in self._optimizer.param_groups:
            old = torch.as_tensor(group["lr"], dtype=torch.float32, device=kl.device)
            new = adapted_learning_rate(old, kl, self.config.desired_kl)
            if isinstance(group["lr"], Tensor):
                # A captured gradient step: the device must not be asked for anything.
                group["lr"].copy_(new if applies is None else torch.where(applies, new, old))
            else:
                group["lr"] = float(new)

    # ------------------------------------------------------------------------------------------ checkpoints

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"optimizer": self._optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "obs_moments": self._obs_moments.state_dict(),
            "reward_scale": self.reward_scale.state_dict(),
            "shuffle": self._shuffle.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps the tensors that it is given
        self._graphed_epochs.forget()  # a captured step would read moments that are no longer in use
        self._obs_moments.load_state_dict(state["obs_moments"])
        self.reward_scale.load_state_dict(state["reward_scale"])
        self._shuffle.set_state(state["shuffle"].cpu())
        if self.net.spec.normalize_obs and self._obs_moments.count:
            # The moments may have been merged with others, which the statistics in `net` know nothing of.
            self._apply_obs_moments()
        self.net.export(self.policy)
