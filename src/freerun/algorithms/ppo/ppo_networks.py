"""The networks that PPO trains, and the policy of the same shape that travels to the workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from freerun.algorithms.policies.cnn_actor import CNNActor
from freerun.algorithms.policies.image_layers import CONV_PLANS, IMAGE_NETWORKS, has_other_numbers
from freerun.algorithms.policies.image_networks import image_networks
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.policies.running_moments import needs_normalizing
from freerun.algorithms.policies.torch_actor import TorchActor, build
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, Policy, callable_name


class PPONetworks(NamedTuple):
    """What `make_networks` makes."""

    net: ActorCritic
    policy: Policy
    is_normalized: Tensor
    """True for each number of an observation that is scaled by its running mean and deviation."""
    measured: Tensor | slice
    """The numbers whose mean and deviation are measured: all, or where there are images those that are normalised."""


def make_networks(config: PPOConfig, env: EnvSpec, seed: int, device: torch.device, deterministic: bool) -> PPONetworks:
    """Make the networks on the device, and the policy with the same weights."""
    network = config.network
    images = env.images if network in IMAGE_NETWORKS else ()
    hidden_sizes = config.hidden_sizes if network is None or has_other_numbers(images, env) else ()
    groups = (env.observation_space,) if env.obs_groups is None else env.obs_groups.present
    is_normalized = torch.from_numpy(np.concatenate([needs_normalizing(group) for group in groups]))
    for image in images:
        is_normalized[image.start : image.stop] = False
    normalize_obs = bool(config.normalize_obs and is_normalized.any())
    spec = ActorSpec.of(env, hidden_sizes, config.activation, normalize_obs)
    scalar_actions = isinstance(env.action_space, spaces.Discrete)
    # The seed of the networks must not reseed others that draw from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own_networks: tuple[nn.Module, nn.Module] | None = None
        if images:
            own_networks = image_networks(network, env, spec, config.hidden_sizes)
        elif network is not None:
            actor = build(network, env.policy_space, spec.output_size)
            own_networks = actor, build(network, env.critic_space, 1)
        net = ActorCritic(spec, own_networks)
        for image in images:
            # Where other numbers are normalised, the normaliser divides the pixels too (`ImageTrunk`).
            net.obs_scale[image.start : image.stop] = 1 / image.highest
        if spec.gaussian_size:
            net.log_std.data.fill_(config.initial_log_std)
    policy: Policy
    if network is None:
        policy = MLPActor(spec, scalar_actions, batch_invariant=deterministic)
    elif network in CONV_PLANS:
        policy = CNNActor(spec, images, network, scalar_actions)
    else:
        name = callable_name(network)
        policy = TorchActor(spec, net.actor, name, scalar_actions, batch_invariant=deterministic)
    net.to(device)
    net.export(policy)
    return PPONetworks(net, policy, is_normalized, is_normalized if images else slice(None))
