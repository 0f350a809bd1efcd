"""Deep Q-learning (Mnih et al. 2015), with what has proved itself since: docs/dqn.md."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from gymnasium import spaces

from freerun.algorithms.dqn.dqn_config import DQNConfig, scaled_defaults
from freerun.algorithms.dqn.q_agent import QAgent
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.sac.off_policy import ReplayLearner, computed_by, learner_note
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.core import AlgorithmTraits, AnySegment, EnvSpec, Metrics, UserError


class DQN(ReplayLearner):
    """Learns the values of discrete actions from the real steps in its buffer, and explores by random actions."""

    traits = AlgorithmTraits(
        action_spaces=(spaces.Discrete,),
        default_max_lag=None,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        has_action_mask=True,
        rates_segments=True,
        has_acceleration=True,
        minibatch_setting="batch_size",
        update_ratio_setting="updates_per_step",
        computed_by=computed_by,
        learner_note=learner_note,
    )
    learned: ClassVar[tuple[str, ...]] = ("agent/online", "agent/target")
    config: DQNConfig
    agent: QAgent

    def _make_spec(self, env: EnvSpec) -> ActorSpec:
        if not isinstance(env.action_space, spaces.Discrete):
            raise UserError(f"this algorithm needs Discrete actions, not {env.action_space}: choose --algo ppo")
        spec = ActorSpec.of(env, self.config.hidden_sizes, self.config.activation)
        return dataclasses.replace(spec, epsilon_greedy=True)

    def _make_agent(self, seed: int) -> QAgent:
        return QAgent(self.spec, self.config, seed, self.device, self._learner_group)

    @property
    def epsilon(self) -> float:
        """The probability of a random action, which falls with the steps that have arrived."""
        return self.config.epsilon_at(self.real_buffer.total)

    def _export(self) -> None:
        self.agent.export(self.policy, epsilon=torch.tensor([self.epsilon]))

    def steps_of(self, segment: AnySegment) -> StepBatch:
        """The steps of a segment as flat rows, with the rewards of the next steps summed up."""
        return self._sum_up_rewards(super().steps_of(segment), segment, self.config.num_return_steps)

    def _base_metrics(self) -> Metrics:
        return {**super()._base_metrics(), "epsilon": self.epsilon}
