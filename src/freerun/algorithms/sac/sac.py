"""Soft actor-critic (Haarnoja et al. 2018): off-policy, with twin critics and a temperature that tunes itself."""

from __future__ import annotations

from gymnasium import spaces

from freerun.algorithms.sac.off_policy import CRITIC_PARTS, ReplayLearner, computed_by
from freerun.algorithms.sac.off_policy_config import scaled_defaults
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_agent import SoftAgent, learner_note
from freerun.core import AlgorithmTraits


class SAC(ReplayLearner):
    """Learns from the real steps in its buffer."""

    traits = AlgorithmTraits(
        action_spaces=(spaces.Box,),
        default_max_lag=None,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        rates_segments=True,
        critic_parts=CRITIC_PARTS,
        has_acceleration=True,
        gains_from_gpu=True,
        minibatch_setting="batch_size",
        update_ratio_setting="updates_per_step",
        computed_by=computed_by,
        learner_note=learner_note,
    )
    config: SACConfig
    agent: SoftAgent

    def _make_agent(self, seed: int) -> SoftAgent:
        return SoftAgent(self.spec, self.config, seed, self.device, self._learner_group)
