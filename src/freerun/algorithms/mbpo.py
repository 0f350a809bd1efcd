"""Model-based policy optimisation (Janner et al. 2019): SAC on short rollouts of a learned model.

Four stages: collecting, training the model, rolling it out, training the agent. Each has its pace per real step. They
take turns, or the last three run at the same time: then the agent learns from rollouts of the update before, and those
use the newest model that has finished training.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from freerun.algorithms.dynamics import Dynamics, DynamicsConfig, Model, Training
from freerun.algorithms.networks import share_one_buffer
from freerun.algorithms.replay import Draw, Replay, ReplayConfig, Steps
from freerun.algorithms.sac import OffPolicy, Pace
from freerun.algorithms.soft_agent import SoftPolicy
from freerun.algorithms.stage import Stage
from freerun.capture import Repeated, choose
from freerun.core import Acceleration, EnvSpec, Metrics, Peers, UserError

logger = logging.getLogger("freerun")


@dataclass(frozen=True)
class MBPOConfig(DynamicsConfig):
    updates_per_step: float = 20.0
    """Gradient steps of the agent per environment step, in every mode."""
    rollouts_per_step: float = 400.0
    """Model rollouts per environment step, each from a real observation."""
    rollout_length: int = 1
    """Steps of a model rollout, at first."""
    rollout_length_end: int | None = None
    """Steps of a model rollout in the end (if not given: as at first)."""
    rollout_growth: tuple[int, int] = (20_000, 100_000)
    """Environment steps between which rollouts grow from the first length to the last."""
    model_steps_kept: int = 1000
    """Learn from the model rollouts of so many environment steps; older ones are forgotten."""
    real_share: float = 0.05
    """Share of real steps in each of the agent's batches; the others are the model's."""
    stages: Literal["auto", "in-turn", "concurrent"] = "auto"
    """Train the model, roll it out and train the agent in turn or at the same time (auto: as the mode does with
    collecting)."""
    # With many updates per step the learner is what takes time: a longer queue would make data older, nothing faster.
    default_max_lag: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollouts_per_step <= 0 or self.rollout_length < 1 or self.model_steps_kept < 1:
            raise UserError("--rollouts-per-step must be above 0, --rollout-length and --model-steps-kept at least 1")
        if self.rollout_length_end is not None and self.rollout_length_end < self.rollout_length:
            raise UserError("--rollout-length-end must be no less than --rollout-length")
        if not 0 <= self.rollout_growth[0] < self.rollout_growth[1]:
            raise UserError("--rollout-growth must be two rising numbers of steps")
        if not 0 <= self.real_share <= 1:
            raise UserError(f"--real-share must lie between 0 and 1, not {self.real_share}")

    def length_at(self, num_steps: int) -> int:
        """The length of model rollouts after so many real steps."""
        first, last = self.rollout_length, self.rollout_length_end or self.rollout_length
        begin, end = self.rollout_growth
        share = min(1.0, max(0.0, (num_steps - begin) / (end - begin)))
        return int(first + share * (last - first))


class Rollouts:
    """Branches many short rollouts off real observations, with a policy and a model that stand still meanwhile."""

    def __init__(
        self, num_rows: int, model: Model, policy: SoftPolicy, sizes: tuple[int, int], acceleration: Acceleration
    ):
        self.num_rows = num_rows
        self._model = model
        self._policy = copy.deepcopy(policy).requires_grad_(False)
        self._weights = share_one_buffer(self._policy).requires_grad_(False)
        self.device = self._weights.device
        obs_size, action_size = sizes
        self._obs = torch.zeros((num_rows, obs_size), device=self.device)
        self._next = torch.zeros_like(self._obs)
        self._action = torch.zeros((num_rows, action_size), device=self.device)
        self._reward = torch.zeros(num_rows, device=self.device)
        self._ended = torch.zeros(num_rows, device=self.device)
        self._step = Repeated(self._step_once, self.device, (model.generator,), acceleration)

    def prepare(self, obs: Tensor, weights: Tensor) -> None:
        """Where to start from, and the policy's weights of now."""
        self._next.copy_(obs)
        self._ended.zero_()
        self._weights.data.copy_(weights.detach())

    def run(self, length: int) -> Steps:
        """The model's steps, all of them from before the end of their rollout."""
        parts: list[Steps] = []
        alive: list[Tensor] = []
        for _ in range(length):
            alive.append(self._ended == 0)
            self._step(1)
            parts.append(Steps(*(part.clone() for part in self._newest())))
        steps = Steps(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if length == 1:
            return steps
        keep = torch.cat(alive).nonzero().squeeze(1)  # the only question to the device
        return Steps(*(part[keep] for part in steps))

    def _newest(self) -> Steps:
        return Steps(self._obs, self._action, self._reward, self._next, self._ended)

    @torch.no_grad()
    def _step_once(self) -> None:
        """One step of every rollout; those that have ended go on, and are left out in the end."""
        self._obs.copy_(self._next)
        noise = torch.randn(self._action.shape, generator=self._model.generator, device=self.device)
        action, _ = self._policy(self._obs, noise)
        self._action.copy_(action)
        next_obs, reward, ended = self._model.predict(self._obs, action)
        self._next.copy_(next_obs)
        self._reward.copy_(reward)
        self._ended.copy_(torch.maximum(self._ended, ended.float()))


class MBPO(OffPolicy):
    config: MBPOConfig

    def __init__(
        self, env: EnvSpec, config: MBPOConfig, seed: int, device: str, deterministic: bool, peers: Peers | None = None
    ):
        super().__init__(env, config, seed, device, deterministic, peers)
        sizes = (self.spec.obs_size, self.spec.gaussian_size)
        acceleration = choose(config.acceleration, self._device)
        self._dynamics = Dynamics(config, *sizes, seed, self._device, self._peers)
        self._model = Model(config, *sizes, seed, self._device, self._peers)
        longest = config.rollout_length_end or config.rollout_length
        capacity = int(config.rollouts_per_step * config.model_steps_kept * longest)
        self._imagined = Replay(max(1, capacity), *sizes, ReplayConfig(), seed + 1, self._device, acceleration)
        self._rollouts = Rollouts(self._rows_per_rollout(), self._model, self._agent.soft_policy, sizes, acceleration)
        generators = (self._agent.generator, self._real.generator, self._imagined.generator)
        self._learn = Repeated(self._learn_once, self._device, generators, acceleration)
        self._rollout_pace = Pace(config.rollouts_per_step / self._rollouts.num_rows)
        self._steps_seen = self._steps_at_training = 0
        self._training: Training | None = None
        self._num_rollbacks = 0
        concurrent = config.stages == "concurrent" and not deterministic
        if concurrent and self._peers.count > 1:
            raise UserError("several learners take the stages of MBPO in turn: give --stages in-turn")
        self._training_stage: Stage[Training] | None = Stage("model", self._device) if concurrent else None
        self._rollout_stage: Stage[list[Steps]] | None = Stage("rollout", self._device) if concurrent else None

    def _rows_per_rollout(self) -> int:
        """One update's rollouts at a time, as many for each elite."""
        config = self.config
        due = (config.steps_per_update or config.default_steps_per_update) * config.rollouts_per_step
        return max(1, round(due / config.num_elites)) * config.num_elites

    @property
    def stages(self) -> dict[str, Stage[Any]]:
        """What goes on beside the agent's own updates, by name."""
        stages = {"model trainer": self._training_stage, "model rollouts": self._rollout_stage}
        return {name: stage for name, stage in stages.items() if stage is not None}

    # ------------------------------------------------------------------------------------------ the stages

    def update(self, version: int, progress: float) -> Metrics:
        new_steps = self._fresh_steps
        self._rollout_pace.earn(self._earn())
        self._steps_seen += new_steps
        if self._training_stage is None or self._model.version == 0:
            if self._training_is_due():
                self._prepare_training()
                self._trained(self._fit())
            self._imagine(self._roll_out(*self._prepare_rollouts()))
            self._learn(self._agent_pace.take())
        else:
            self._update_concurrently(self._training_stage)
        self._agent.export(self.policy)
        return self._metrics()

    def _update_concurrently(self, training: Stage[Training]) -> None:
        """A training may last for several updates; rollouts and the agent's gradient steps end with this one."""
        if training.is_busy and (training.is_done or self._training_is_due()):
            self._trained(training.finish())
        if not training.is_busy and self._training_is_due():
            self._prepare_training()
            training.start(self._fit)
        assert self._rollout_stage is not None
        prepared = self._prepare_rollouts()
        self._rollout_stage.start(lambda: self._roll_out(*prepared))
        self._learn(self._agent_pace.take())
        self._imagine(self._rollout_stage.finish())

    def _training_is_due(self) -> bool:
        since = self._steps_seen - self._steps_at_training
        return self._model.version == 0 or since >= self.config.steps_per_model_training

    def _prepare_training(self) -> None:
        new_steps = min(self._steps_seen - self._steps_at_training, self._real.size)
        self._max_updates = max(1, int(self.config.model_updates_per_step * new_steps))
        self._steps_at_training = self._steps_seen
        self._dynamics.prepare(self._real.newest(self._real.size))

    def _fit(self) -> Training:
        return self._dynamics.fit(self._max_updates)

    def _trained(self, training: Training) -> None:
        """From now on rollouts use the new model."""
        self._training = training
        self._dynamics.hand_over(self._model)
        if training.diverged:
            self._num_rollbacks += 1
            logger.warning(
                "the dynamics model diverged in its training after %d steps: every network was set back to its best "
                "weights (error on held-out steps %.3g); a lower --model-learning-rate may help",
                self._steps_seen,
                training.holdout_error,
            )

    def _prepare_rollouts(self) -> tuple[int, int]:
        """How many batches of rollouts are due, and how long they are."""
        num_batches = self._rollout_pace.take()
        self._starts = [self._real.draw(self._rollouts.num_rows).steps.obs for _ in range(num_batches)]
        self._policy_weights = self._agent.weights.detach().clone()
        return num_batches, self.config.length_at(self._steps_seen)

    def _roll_out(self, num_batches: int, length: int) -> list[Steps]:
        batches = []
        for start in self._starts:
            self._rollouts.prepare(start, self._policy_weights)
            batches.append(self._rollouts.run(length))
        return batches

    def _imagine(self, batches: list[Steps]) -> None:
        """Keep what the model has made; every step carries the model's version."""
        for steps in batches:
            versions = torch.full((len(steps.reward),), self._model.version, device=self._device)
            self._imagined.add(steps, versions)
        config, length = self.config, self.config.length_at(self._steps_seen)
        self._imagined.limit(int(config.rollouts_per_step * config.model_steps_kept * length))

    def _learn_once(self) -> None:
        num_real = round(self.config.real_share * self.config.batch_size)
        real, imagined = self._real.draw(num_real), self._imagined.draw(self.config.batch_size - num_real)
        steps = Steps(*(torch.cat(parts) for parts in zip(real.steps, imagined.steps, strict=True)))
        weight = torch.cat([real.weight, imagined.weight])
        td_error = self._agent.learn(Draw(steps, weight, real.rows))
        self._real.prioritise(real.rows, td_error[:num_real])

    # ------------------------------------------------------------------------------------------ what is known of it

    def _metrics(self) -> Metrics:
        training = self._training
        return {
            **self._base_metrics(),
            **self._dynamics.metrics(),
            "concurrent_stages": float(self._training_stage is not None),
            "model_data": float(self._imagined.size),
            "model_version": float(self._model.version),
            "model_error": training.holdout_error if training else float("nan"),
            "model_rollbacks": float(self._num_rollbacks),
            "rollout_length": float(self.config.length_at(self._steps_seen)),
        }

    def state_dict(self) -> dict[str, Any]:
        if self._training_stage is not None and self._training_stage.is_busy:
            self._trained(self._training_stage.finish())
        return {
            **super().state_dict(),
            "dynamics": self._dynamics.state_dict(),
            "model": self._model.state_dict(),
            "imagined": self._imagined.state_dict(),
            "rollout_pace": self._rollout_pace.state_dict(),
            "steps": (self._steps_seen, self._steps_at_training),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._dynamics.load_state_dict(state["dynamics"])
        self._model.load_state_dict(state["model"])
        self._imagined.load_state_dict(state["imagined"])
        self._rollout_pace.load_state_dict(state["rollout_pace"])
        self._steps_seen, self._steps_at_training = state["steps"]
