"""Model-based policy optimisation (Janner et al. 2019, algorithm 2): SAC on short rollouts of a learned model.

It has four stages: collecting, training the model, rolling it out, and training the agent. Each does a declared amount
of work per real step. The last three take turns, or run at the same time: then the agent learns from the rollouts of
the update before, and rollouts use the newest model that has finished training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces

from freerun.algorithms.learners.fast_learner import learner_words
from freerun.algorithms.mbpo.dynamics import Dynamics, EnsembleTraining
from freerun.algorithms.mbpo.ensemble import EliteModel, Ensemble
from freerun.algorithms.mbpo.fast_agent import make_fast_agent
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig, scaled_defaults, with_learner
from freerun.algorithms.mbpo.model_rollouts import ModelRollouts
from freerun.algorithms.mbpo.stage import BackgroundStage
from freerun.algorithms.sac import off_policy
from freerun.algorithms.sac.off_policy import CRITIC_PARTS, OffPolicy, UpdateBudget
from freerun.algorithms.sac.off_policy_config import pace_words
from freerun.algorithms.sac.replay_buffer import ReplayBuffer, ReplayConfig, ReplaySample, StepBatch
from freerun.algorithms.sac.soft_agent import SoftAgent, is_written_out
from freerun.core import AlgorithmTraits, AnySegment, ComputedBy, EnvSpec, LearnerGroup, Metrics, UserError
from freerun.cuda_graphs import GraphedStep

logger = logging.getLogger("freerun")


def _console_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return the line that users of the original MBPO know."""
    label = "AsyncMBPO" if metrics["concurrent_stages"] else "MBPO"
    names = ("real_data", "model_data", "agent_updates", "dynamics_updates")
    return f"[{label}] step={step} " + " ".join(f"{name}={metrics[name]:.0f}" for name in names)


def learner_note(config: MBPOConfig, device: str) -> str:
    """What a run learns with, for its header: where the model is large, its first training may take minutes."""
    most = config.work_per_step("model_updates_per_step")
    words = learner_words(is_written_out(with_learner(config), device))
    return f"{pace_words(config)}, and up to {most:.3g} of the model · {words}"


def computed_by(config: MBPOConfig, device: str) -> ComputedBy:
    return off_policy.computed_by(with_learner(config), device)


class MBPO(OffPolicy):
    """Learns from real steps and from steps of a learned model."""

    traits = AlgorithmTraits(
        action_spaces=(spaces.Box,),
        # With many updates per step the learner takes most of the time: a longer queue would only make data older.
        default_max_lag=1,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        has_stages=True,
        rates_segments=True,
        critic_parts=CRITIC_PARTS,
        has_acceleration=True,
        gains_from_gpu=True,
        code_settings=("termination",),
        # No minibatch_setting: another thread may be training with the minibatch size when it would change.
        update_ratio_setting="updates_per_step",
        computed_by=computed_by,
        learner_note=learner_note,
        console_line=_console_line,
    )
    config: MBPOConfig
    agent: SoftAgent

    def __init__(
        self,
        env: EnvSpec,
        config: MBPOConfig,
        seed: int,
        device: str,
        deterministic: bool,
        learner_group: LearnerGroup | None = None,
    ):
        config = with_learner(config)
        super().__init__(env, config, seed, device, deterministic, learner_group)
        self._require_shares(config.model_batch_size, "--model-batch-size")
        self.dynamics = Dynamics(config, *self._sizes, seed, self.device, self._learner_group)
        elites = Ensemble.of(config, config.num_elites, *self._sizes).to(self.device)
        self.model = EliteModel(elites, config.termination, seed, self._learner_group)
        self.rollouts = ModelRollouts(
            self._rows_per_rollout(), self.model, self.agent.networks.policy, self._sizes, self._acceleration
        )
        capacity = self._num_unexpired(config.rollout_length_end or config.rollout_length)
        # seed + 1, so that real and model steps are not drawn by the same random numbers.
        self.model_buffer = ReplayBuffer(
            capacity, *self._sizes, ReplayConfig(), seed + 1, self.device, self._acceleration
        )
        self.agent_buffer = self.real_buffer
        """The real steps that the agent learns from. The model always learns from `real_buffer`."""
        if config.sums_up_rewards:
            if self._learner_group.count > 1:
                raise UserError("several learners share single real steps: give --num-return-steps 1")
            self.agent_buffer = ReplayBuffer(
                config.buffer_size, *self._sizes, config, seed, self.device, self._acceleration
            )
        self._num_real_rows = round(config.real_share * config.rows_per_batch)
        generators = (self.agent.generator, self.agent_buffer.generator, self.model_buffer.generator)
        self.take_gradient_steps = GraphedStep(self._gradient_step, self.device, generators, self._acceleration)
        # Counted in batches of rollouts, which is how many step together.
        self._rollout_budget = UpdateBudget(config.work_per_step("rollouts_per_step") / self.rollouts.num_rows)
        self._num_real_steps = self._num_steps_at_training = 0
        self._last_training: EnsembleTraining | None = None
        self._num_rollbacks = 0
        self._has_warned_of_rejected = False
        self._followed_version: int | None = None
        is_concurrent = config.stages == "concurrent" and not deterministic
        if is_concurrent and self._learner_group.count > 1:
            raise UserError("several learners take the stages of MBPO in turn: give --stages in-turn")
        self._training_stage: BackgroundStage[EnsembleTraining] | None = (
            BackgroundStage("model", self.device) if is_concurrent else None
        )
        self._rollout_stage: BackgroundStage[list[StepBatch]] | None = (
            BackgroundStage("rollout", self.device) if is_concurrent else None
        )

    def _make_agent(self, seed: int) -> SoftAgent:
        make = make_fast_agent if self.config.agent == "fast" else SoftAgent
        return make(self.spec, self.config, seed, self.device, self._learner_group)

    def observe(self, segments: Sequence[AnySegment]) -> None:
        super().observe(segments)
        if self.config.sums_up_rewards:
            for segment in segments:
                steps = self._sum_up_rewards(self.steps_of(segment), segment, self.config.num_return_steps)
                self.agent_buffer.add(steps, self._versions_of(segment))

    def _rows_per_rollout(self) -> int:
        """Rows of a batch of rollouts: equally many for each elite, and no more than one update pays for.

        Rounded down: a larger batch would not be due at the first update, which would have no model step to learn from.
        """
        config = self.config
        due = min(config.num_steps_per_update, config.num_model_steps_kept) * config.work_per_step("rollouts_per_step")
        return max(1, int(due / config.num_elites)) * config.num_elites

    def _num_unexpired(self, length: int) -> int:
        """How many model steps the agent learns from while rollouts have this length; at least one batch of them."""
        num_steps = int(self.config.work_per_step("rollouts_per_step") * self.config.num_model_steps_kept * length)
        return max(self.rollouts.num_rows * length, num_steps)

    @property
    def stages(self) -> dict[str, BackgroundStage[Any]]:
        """The stages that run beside the agent's own updates, by name."""
        stages = {"model trainer": self._training_stage, "model rollouts": self._rollout_stage}
        return {name: stage for name, stage in stages.items() if stage is not None}

    # ------------------------------------------------------------------------------------------ the update

    def update(self, version: int, progress: float) -> Metrics:
        self._num_real_steps += self._num_new_steps
        self._rollout_budget.earn(self._earn_updates())
        self.agent_buffer.anneal_beta(progress)
        if self._training_stage is None or self.model.version == 0:
            if self._is_training_due():
                self._prepare_training()
                self._use_trained_model(self.dynamics.fit(self._max_model_updates))
            self._prepare_rollouts()
            self._store_model_steps(self._roll_out())
            self._train_agent()
        else:
            self._update_concurrently(self._training_stage)
        self.agent.export(self.policy)
        return self._metrics()

    def _update_concurrently(self, training: BackgroundStage[EnsembleTraining]) -> None:
        """The same stages at the same time.

        A training may last for several updates; rollouts and the agent's gradient steps end with this update.
        """
        # A training that still goes on when the next one is due is waited for.
        if training.is_busy and self._takes_trained_model(training):
            self._use_trained_model(training.finish())
        if not training.is_busy and self._is_training_due():
            self._prepare_training()
            training.start(functools.partial(self.dynamics.fit, self._max_model_updates))
        assert self._rollout_stage is not None
        self._prepare_rollouts()
        self._rollout_stage.start(self._roll_out)
        self._train_agent()
        self._store_model_steps(self._rollout_stage.finish())

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Make the next update as the one with these metrics was made. The clock has decided one thing in it: whether a
        training of the model had ended."""
        if "model_version" not in metrics:
            raise UserError("the metrics of the run do not say which version of the model each update has used")
        self._followed_version = int(metrics["model_version"])

    def _takes_trained_model(self, training: BackgroundStage[EnsembleTraining]) -> bool:
        if self._followed_version is not None:
            return self.model.version < self._followed_version
        return training.is_done or self._is_training_due()

    # ------------------------------------------------------------------------------------------ training the model

    def _is_training_due(self) -> bool:
        num_steps = self._num_real_steps - self._num_steps_at_training
        return self.model.version == 0 or num_steps >= self.config.steps_per_model_training

    def _prepare_training(self) -> None:
        num_new = min(self._num_real_steps - self._num_steps_at_training, self.real_buffer.size)
        self._max_model_updates = max(1, int(self.config.work_per_step("model_updates_per_step") * num_new))
        self._num_steps_at_training = self._num_real_steps
        self.dynamics.prepare(self.real_buffer.newest(self.real_buffer.size))

    def _use_trained_model(self, training: EnsembleTraining) -> None:
        """From now on rollouts use the new model."""
        self._last_training = training
        self.dynamics.hand_over(self.model)
        if training.diverged:
            self._num_rollbacks += 1
            logger.warning(
                "the dynamics model diverged in its training after %d steps: every network was set back to its best "
                "weights (error on held-out steps %.3g); a lower --model-learning-rate may help",
                self._num_real_steps,
                training.holdout_error,
            )

    # ------------------------------------------------------------------------------------------ rolling it out

    def _prepare_rollouts(self) -> None:
        """Draw the starts of the rollouts that are due, and copy all that they use: the agent learns meanwhile."""
        # Where less than a batch is due per update, the first one is made early: the agent has no other model steps.
        num_batches = self._rollout_budget.take(at_least=int(self.model_buffer.size == 0))
        self._rollout_starts = [self.real_buffer.sample(self.rollouts.num_rows).steps.obs for _ in range(num_batches)]
        self._rollout_policy = self.agent.weights.detach().clone()
        self._rollout_length = self.config.length_at(self._num_real_steps)

    def _roll_out(self) -> list[StepBatch]:
        batches = []
        for start in self._rollout_starts:
            self.rollouts.prepare(start, self._rollout_policy)
            batches.append(self.rollouts.run(self._rollout_length))
        return batches

    def _store_model_steps(self, batches: list[StepBatch]) -> None:
        """Every model step carries the version of the model."""
        for steps in batches:
            versions = torch.full((len(steps.reward),), self.model.version, device=self.device)
            self.model_buffer.add(steps, versions)
        self._forget_expired()

    def _forget_expired(self) -> None:
        """The agent learns from the newest model steps only: those of the last `num_model_steps_kept` real ones."""
        self.model_buffer.draw_from_newest(self._num_unexpired(self.config.length_at(self._num_real_steps)))

    # ------------------------------------------------------------------------------------------ training the agent

    def _train_agent(self) -> None:
        """The gradient steps that are due. While there is no model step to learn from, they stay due."""
        if self.model_buffer.size or self._num_real_rows == self.config.rows_per_batch:
            self.take_gradient_steps(self._agent_budget.take())

    def _gradient_step(self) -> None:
        """One step of the agent on a batch of real and model steps."""
        num_real = self._num_real_rows
        real = self.agent_buffer.draw(num_real)
        imagined = self.model_buffer.draw(self.config.rows_per_batch - num_real)
        steps = self.real_buffer.split(torch.cat([real.values, imagined.values]))
        weight = torch.cat([real.weight, imagined.weight])
        td_error = self.agent.learn(ReplaySample(steps, weight, real.rows))
        self.agent_buffer.update_priorities(real.rows, td_error[:num_real])

    # ------------------------------------------------------------------------------------------ metrics, checkpoints

    def _metrics(self) -> Metrics:
        training = self._last_training
        return {
            **self._base_metrics(),
            **self.dynamics.metrics(),
            "concurrent_stages": float(self._training_stage is not None),
            "model_data": float(self.model_buffer.size),
            "model_version": float(self.model.version),
            "model_error": training.holdout_error if training else float("nan"),
            "model_rollbacks": float(self._num_rollbacks),
            "model_steps_rejected": float(self._take_num_rejected()),
            "rollout_length": float(self.config.length_at(self._num_real_steps)),
        }

    def _take_num_rejected(self) -> int:
        """How many model steps of this update were not finite. Only the first of them cause a warning."""
        num_rejected = int(self.rollouts.num_rejected)
        self.rollouts.num_rejected.zero_()
        if num_rejected and not self._has_warned_of_rejected:
            self._has_warned_of_rejected = True
            logger.warning(
                "after %d steps the dynamics model made %d steps that are not finite: nothing is learned from them, "
                "and from now on the metric model_steps_rejected counts such steps without another warning; a shorter "
                "--rollout-length or a lower --model-learning-rate may help",
                self._num_real_steps,
                num_rejected,
            )
        return num_rejected

    def state_dict(self) -> dict[str, Any]:
        if self._training_stage is not None and self._training_stage.is_busy:
            # The networks are part of the state, so their training must be over when they are saved.
            self._use_trained_model(self._training_stage.finish())
        summed_up = {"summed_up": self.agent_buffer.state_dict()} if self.config.sums_up_rewards else {}
        return {
            **super().state_dict(),
            **summed_up,
            "dynamics": self.dynamics.state_dict(),
            "model": self.model.state_dict(),
            "imagined": self.model_buffer.state_dict(),
            "rollout_pace": self._rollout_budget.state_dict(),
            "steps": (self._num_real_steps, self._num_steps_at_training),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.config.sums_up_rewards:
            self.agent_buffer.load_state_dict(state["summed_up"])
        self.dynamics.load_state_dict(state["dynamics"])
        self.model.load_state_dict(state["model"])
        self.model_buffer.load_state_dict(state["imagined"])
        self._rollout_budget.load_state_dict(state["rollout_pace"])
        self._num_real_steps, self._num_steps_at_training = state["steps"]
        self._forget_expired()  # concurrent stages draw model steps before they add any
