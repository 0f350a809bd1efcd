"""What PPO learns from: the same whether the steps come as a grid of tensors or as a flat batch."""

from __future__ import annotations

import pytest
import torch

from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.training_batch import TensorGrid, flatten_segments, prepare_flat_batch, prepare_grid
from freerun.core import TensorSegment
from freerun_envs.drone_sim import RoughDroneSim

CPU = torch.device("cpu")
NUM_STEPS = 6
NEWEST = 5


def segment(num_envs: int, version: int) -> TensorSegment:
    draw = torch.Generator().manual_seed(num_envs)
    size = (NUM_STEPS, num_envs)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn((*size, *shape), generator=draw)

    terminated = torch.rand(size, generator=draw) < 0.2
    truncated = (torch.rand(size, generator=draw) < 0.2) & ~terminated
    spec = RoughDroneSim(1, "cpu", "hover").spec
    obs_size = spec.observation_space.shape[0]
    return TensorSegment(
        obs=floats(obs_size),
        action=floats(4),
        log_prob=floats(),
        reward=floats(),
        terminated=terminated,
        truncated=truncated,
        next_obs=floats(obs_size),
        episode_return=floats(),
        episode_length=torch.ones(size, dtype=torch.int64),
        version=version,
        seconds=0.0,
    )


@pytest.mark.parametrize("lag_correction", ["decoupled", "vtrace"])
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_a_grid_gives_the_training_batch_of_a_flat_batch(lag_correction: str, normalize_obs: bool) -> None:
    segments = [segment(3, NEWEST), segment(2, NEWEST - 1)]
    env = RoughDroneSim(1, "cpu", "hover").spec
    net = ActorCritic(ActorSpec.of(env, (8,), "tanh", normalize_obs))
    net.obs_mean.fill_(0.1)
    net.obs_scale.fill_(0.7)
    config = PPOConfig(lag_correction=lag_correction, normalize_obs=normalize_obs)  # type: ignore[arg-type]
    batch = flatten_segments(segments, CPU)
    wanted = prepare_flat_batch(net, config, batch, batch.reward, NEWEST)
    found = prepare_grid(net, config, TensorGrid.of(segments, CPU, NEWEST))
    for name, part in found._asdict().items():
        torch.testing.assert_close(part, getattr(wanted, name), msg=name)
    fresh = torch.arange(NUM_STEPS * 5) % 5 < 3
    assert (found.importance_weight[fresh] == 1).all(), "steps without lag weigh exactly 1"
    assert (found.importance_weight[~fresh] != 1).any()


def test_a_step_that_ends_an_episode_is_followed_by_its_final_observation() -> None:
    """One drone, two steps, rewards 1; the first is cut off: its advantage is r + γ V(final) − V(obs), no more."""
    segments = [segment(1, NEWEST)]
    segments[0].reward.fill_(1.0)
    segments[0].terminated.fill_(False)
    segments[0].truncated.fill_(False)
    segments[0].truncated[0] = True
    net = ActorCritic(ActorSpec.of(RoughDroneSim(1, "cpu", "hover").spec, (8,), "tanh", False))
    found = prepare_grid(net, PPOConfig(gamma=0.5), TensorGrid.of(segments, CPU, NEWEST))
    with torch.no_grad():
        final = net.value(segments[0].next_obs[0])
    torch.testing.assert_close(found.advantage[:1], 1.0 + 0.5 * final - found.value[:1])
