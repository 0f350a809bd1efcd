"""Fast SAC: off-policy learning that keeps up with thousands of environments (docs/fastsac.md)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.algorithms.fastsac.critic_heads import CriticHead, DistributionHead, ScalarHead
from freerun.algorithms.fastsac.fastsac_config import FastSACConfig, learner_note, scaled_defaults
from freerun.algorithms.fastsac.large_batch_steps import LargeBatchSteps
from freerun.algorithms.fastsac.obs_normalizer import ObsNormalizer
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import NormalizedReLU
from freerun.algorithms.sac.off_policy import CRITIC_PARTS, OffPolicy
from freerun.algorithms.sac.replay_buffer import StepBatch
from freerun.algorithms.sac.soft_agent import SoftAgent
from freerun.algorithms.sac.soft_networks import SoftNetworks
from freerun.algorithms.sac.soft_steps import SoftSteps, StepParts
from freerun.core import AlgorithmTraits, AnySegment, EnvSpec, LearnerGroup, Metrics
from freerun.cuda_graphs import GraphedStep


class FastSAC(OffPolicy):
    """Learns from the real steps in its buffer, with few gradient steps on large batches."""

    traits = AlgorithmTraits(
        action_spaces=(spaces.Box,),
        # Each update is a large part of what is learned, so older weights would collect what is long known.
        default_max_lag=1,
        counts_steps=True,
        scaled_defaults=scaled_defaults,
        rates_segments=True,
        critic_parts=CRITIC_PARTS,
        has_acceleration=True,
        gains_from_gpu=True,
        minibatch_setting="batch_size",
        update_ratio_setting="updates_per_step",
        learner_note=learner_note,
    )
    learned: ClassVar[tuple[str, ...]] = (*OffPolicy.learned, "obs_moments")
    config: FastSACConfig
    agent: SoftAgent

    def __init__(
        self,
        env: EnvSpec,
        config: FastSACConfig,
        seed: int,
        device: str,
        deterministic: bool,
        learner_group: LearnerGroup | None = None,
    ):
        if config.acceleration == "auto" and device.startswith("cuda"):
            # Fusing kernels takes half a minute before the first update, and a run may take less.
            config = dataclasses.replace(config, acceleration="graph")
        self._normalizer = ObsNormalizer(env.observation_space, torch.device(device), config.normalize_obs is not False)
        super().__init__(env, config, seed, device, deterministic, learner_group)

    def _make_spec(self, env: EnvSpec) -> ActorSpec:
        config = self.config
        spec = ActorSpec.squashed(env, config.hidden_sizes, config.activation, self._normalizer.enabled)
        if config.actor_layer_norm:
            spec = dataclasses.replace(spec, activation="normalized-relu")
        return dataclasses.replace(spec, noise_range=config.noise_range if config.policy == "deterministic" else ())

    def _make_agent(self, seed: int) -> SoftAgent:
        config, device = self.config, self.device
        head: CriticHead = ScalarHead(config.twins)
        if config.critic == "distribution":
            head = DistributionHead(config.twins, config.v_min, config.v_max, config.num_atoms, device)
        networks = SoftNetworks(
            self.spec,
            config.learning_rate,
            seed,
            device,
            config.initial_temperature,
            head.num_outputs,
            NormalizedReLU() if config.layer_norm else torch.relu,
        )

        def make_steps(parts: StepParts) -> LargeBatchSteps:
            self._critic_steps = LargeBatchSteps(parts, config, head, self._normalizer, trains_policy=False)
            return LargeBatchSteps(parts, config, head, self._normalizer)

        return SoftAgent(self.spec, config, seed, device, self._learner_group, networks, make_steps)

    def _export(self) -> None:
        self.agent.export(self.policy, **self._normalizer.statistics())

    # ------------------------------------------------------------------------------------------ collecting

    def _store(self, steps: StepBatch, versions: Tensor) -> None:
        super()._store(steps, versions)
        # Segment by segment, in an order that all modes and all learners share: so all of them get the same bits.
        self._normalizer.update(steps.obs)

    def steps_of(self, segment: AnySegment) -> StepBatch:
        """The steps of a segment as flat rows, with the rewards of the next steps summed up."""
        return self._sum_up_rewards(super().steps_of(segment), segment, self.config.num_return_steps)

    def importance(self, segment: AnySegment) -> float:
        return float(self._critic_steps.td_error(self.steps_of(segment)).abs().mean())

    # ------------------------------------------------------------------------------------------ learning

    def reconfigure(self, config: FastSACConfig) -> None:  # type: ignore[override]
        super().reconfigure(config)
        for step in self._graphed_steps:
            step.forget()  # a captured step would keep its batch size

    @functools.cached_property
    def _graphed_steps(self) -> tuple[GraphedStep, GraphedStep]:
        """A gradient step of the critics alone, and one of critics and policy."""
        generators = (self.agent.generator, self.real_buffer.generator)
        critics, both = (
            GraphedStep(functools.partial(self._gradient_step, steps), self.device, generators, self._acceleration)
            for steps in (self._critic_steps, self.agent.soft_steps)
        )
        return critics, both

    def update(self, version: int, progress: float) -> Metrics:
        self._earn_updates()
        self.real_buffer.anneal_beta(progress)
        first = self._agent_budget.done
        critics, both = self._graphed_steps
        for number in range(first, first + self._agent_budget.take()):
            # The first one trains the policy too, so that every run has metrics of it.
            (critics if number % self.config.policy_delay else both)(1)
        self._export()
        return self._base_metrics()

    def _gradient_step(self, soft_steps: SoftSteps) -> None:
        sample = self.real_buffer.sample(self.config.rows_per_batch)
        td_error = self.agent.learn_by(soft_steps, sample)
        self.real_buffer.update_priorities(sample.rows, td_error)

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "obs_moments": self._normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._normalizer.load_state_dict(state["obs_moments"])
        super().load_state_dict(state)
