"""Soft actor-critic (Haarnoja et al. 2018): off-policy, with twin critics and a temperature that tunes itself."""

from __future__ import annotations

import functools

from gymnasium import spaces

from freerun.algorithms.sac.off_policy import OffPolicy, learner_note
from freerun.algorithms.sac.sac_config import SACConfig, scaled_defaults
from freerun.core import AlgorithmTraits, Metrics
from freerun.cuda_graphs import GraphedStep


class SAC(OffPolicy):
    """Learns from the real steps in its buffer."""

    traits = AlgorithmTraits(
        action_spaces=(spaces.Box,),
        default_max_lag=None,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        rates_segments=True,
        has_acceleration=True,
        minibatch_setting="batch_size",
        update_ratio_setting="updates_per_step",
        learner_note=learner_note,
    )

    @functools.cached_property
    def take_gradient_steps(self) -> GraphedStep:
        """Call it with the number of gradient steps to take. On a GPU they are replays of one captured graph."""
        generators = (self.agent.generator, self.real_buffer.generator)
        return GraphedStep(self._gradient_step, self.device, generators, self._acceleration)

    def reconfigure(self, config: SACConfig) -> None:
        super().reconfigure(config)
        self.take_gradient_steps.forget()  # a captured step would keep its batch size

    def update(self, version: int, progress: float) -> Metrics:
        self._earn_updates()
        self.real_buffer.anneal_beta(progress)
        self.take_gradient_steps(self._agent_budget.take())
        self.agent.export(self.policy)
        return self._base_metrics()

    def _gradient_step(self) -> None:
        sample = self.real_buffer.sample(self.config.rows_per_batch)
        td_error = self.agent.learn(sample)
        self.real_buffer.update_priorities(sample.rows, td_error)
