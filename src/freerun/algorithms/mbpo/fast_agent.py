"""Fast SAC's agent as the one that learns from MBPO's steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from gymnasium import spaces

from freerun.algorithms.fastsac.critic_heads import ScalarHead
from freerun.algorithms.fastsac.fastsac_config import FastSACConfig
from freerun.algorithms.fastsac.large_batch_steps import LargeBatchSteps
from freerun.algorithms.fastsac.obs_normalizer import ObsNormalizer
from freerun.algorithms.mbpo.mbpo_config import MBPOConfig
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import NormalizedReLU
from freerun.algorithms.sac.sac_config import SACConfig
from freerun.algorithms.sac.soft_agent import SoftAgent
from freerun.algorithms.sac.soft_networks import SoftNetworks
from freerun.core import LearnerGroup


def make_fast_agent(
    spec: ActorSpec, config: MBPOConfig, seed: int, device: torch.device, group: LearnerGroup
) -> SoftAgent:
    """Return an agent with fast SAC's critics and gradient steps, and with the settings that it shares with SAC."""
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(SACConfig)}
    fast_config, head = FastSACConfig(**shared), ScalarHead(twins="mean")
    # Observations stay as they are: the model makes some, and moments of real ones alone would not suit both.
    space = spaces.Box(-np.inf, np.inf, (spec.obs_size,))
    as_they_are = ObsNormalizer(space, device, enabled=False)
    networks = SoftNetworks(
        spec, config.learning_rate, seed, device, config.initial_temperature, critic_activation=NormalizedReLU()
    )
    return SoftAgent(
        spec,
        config,
        seed,
        device,
        group,
        networks,
        lambda parts: LargeBatchSteps(parts, fast_config, head, as_they_are),
    )
