"""PPO with a memory: the learner recomputes what workers remembered, and gradients flow along sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toy_tensors import Counting

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.learners.shared_update import JoinedRows, SegmentSize
from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.numpy_memory import MemoryKind
from freerun.algorithms.policies.recurrent_networks import RecurrentActorCritic
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.algorithms.ppo.sequences import Sequences, draw_sequences
from freerun.algorithms.ppo.training_batch import flatten_segments
from freerun.collecting.rollouts.episode_numbers import next_from
from freerun.collecting.rollouts.rollout import Rollout
from freerun.collecting.rollouts.single_env_rollout import SingleEnvRollout
from freerun.collecting.scheduling.resting_rows import without_resting_rows
from freerun.collecting.tensors.tensor_rollout import TensorRollout
from freerun.core import EnvSpec, ImagePart, Segment, SingleLearner, TensorSegment, UserError
from freerun_envs.drone_sim import RoughDroneSim

CPU = torch.device("cpu")
MAZE = GymnasiumFactory("freerun/TMaze-v0", {"length": 4})


def make(kind: MemoryKind = "gru", **settings: Any) -> tuple[PPO, RecurrentActorCritic, MemoryActor]:
    config = PPOConfig(memory=kind, memory_size=8, hidden_sizes=(8,), steps_per_update=1, **settings)
    ppo = PPO(MAZE.spec, config, 0, "cpu", True)
    assert isinstance(ppo.net, RecurrentActorCritic)
    assert isinstance(ppo.policy, MemoryActor)
    return ppo, ppo.net, ppo.policy


def collected(policy: MemoryActor, num_segments: int, num_envs: int = 3, num_steps: int = 7) -> list[Segment]:
    """Segments that continue each other, with the ends of several episodes in them."""
    rollout = Rollout(MAZE.make(num_envs), policy, run_seed=0)
    rollout.load(policy.weights.copy(), 0)
    segments = rollout.segments(num_steps, next_from(range(1000)))
    return [next(segments).copy() for _ in range(num_segments)]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize(("sequence_steps", "burn_in"), [(1, 0), (3, 0), (64, 0), (3, 1), (3, 2), (64, 5)])
def test_the_learner_remembers_what_the_worker_did(kind: MemoryKind, sequence_steps: int, burn_in: int) -> None:
    """Log-probabilities that are recomputed from the memory at the start of a segment are those of the worker."""
    _, net, policy = make(kind)
    for segments in (collected(policy, 3), collected(policy, 3)[1:], whole_episodes(policy)):
        flat = flatten_segments(segments, CPU)
        sequences = Sequences(segments, net.memory_size, sequence_steps, CPU, burn_in)
        seen, _ = sequences.remember(net, net.normalize(flat.obs), net.normalize(flat.boundary_next_obs))
        log_prob = net.log_prob(net.head(seen), flat.action)
        np.testing.assert_allclose(log_prob.detach().numpy(), flat.log_prob.numpy(), atol=1e-5)
        # Gradient steps see the same, in any order of rows.
        rows = torch.randperm(len(seen))[: len(seen) // 2]
        np.testing.assert_allclose(sequences.seen(net, rows).detach().numpy(), seen[rows].numpy(), atol=1e-6)


def test_a_row_in_which_an_environment_resets_leaves_nothing_to_remember() -> None:
    """A vector environment that resets at the next step shows the old episode's end once more."""
    factory = GymnasiumFactory("vector:CartPole-v1", {})
    config = PPOConfig(memory="gru", memory_size=8, hidden_sizes=(8,), steps_per_update=1, normalize_obs=False)
    ppo = PPO(factory.spec, config, 0, "cpu", False)
    net = ppo.net
    assert isinstance(net, RecurrentActorCritic)
    rollout = Rollout(factory.make(3), ppo.policy, run_seed=0)
    rollout.load(ppo.policy.weights.copy(), 0)
    parts = rollout.segments(40, next_from(range(1000)))
    handed_over = [next(parts).copy() for _ in range(2)]
    assert any(segment.resting is not None for segment in handed_over)
    segments = without_resting_rows(handed_over)
    flat = flatten_segments(segments, CPU)
    seen, _ = Sequences(segments, net.memory_size, 64, CPU).remember(net, flat.obs, flat.boundary_next_obs)
    log_prob = net.log_prob(net.head(seen), flat.action)
    np.testing.assert_allclose(log_prob.detach().numpy(), flat.log_prob.numpy(), atol=1e-5)


def whole_episodes(policy: MemoryActor) -> list[Segment]:
    rollout = SingleEnvRollout(MAZE.make_one(), MAZE.spec, policy, run_seed=0)
    rollout.load(policy.weights.copy(), 0)
    return [segment.copy() for segment in rollout.episodes(next_from(range(5)))]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_learner_remembers_what_a_simulator_on_a_device_did(kind: MemoryKind) -> None:
    env = RoughDroneSim(5, "cpu", "hover")
    ppo = PPO(env.spec, PPOConfig(memory=kind, memory_size=8, hidden_sizes=(8,), normalize_obs=False), 0, "cpu", False)
    net = ppo.net
    assert isinstance(net, RecurrentActorCritic)
    rollout = TensorRollout(env, ppo.policy.on(CPU, 0), num_steps=6)
    rollout.load(ppo.policy.weights, 0)
    segments: list[TensorSegment] = [rollout.collect() for _ in range(3)]
    assert segments[0].memory is not None
    assert segments[1].memory is not None
    assert not segments[0].memory.any()
    assert segments[1].memory.any()
    # Two segments side by side, as two simulators would hand them over.
    flat = flatten_segments(segments[1:], CPU)
    sequences = Sequences(segments[1:], net.memory_size, 4, CPU)
    seen, _ = sequences.remember(net, flat.obs, flat.boundary_next_obs)
    log_prob = net.log_prob(net.head(seen), flat.action)
    np.testing.assert_allclose(log_prob.detach().numpy(), flat.log_prob.numpy(), rtol=1e-4, atol=1e-4)


def test_the_memory_of_a_simulator_is_emptied_where_an_episode_ends() -> None:
    env = Counting(4, "cpu", None, True)
    ppo = PPO(env.spec, PPOConfig(memory="gru", memory_size=8, hidden_sizes=(8,), normalize_obs=False), 0, "cpu", False)
    rollout = TensorRollout(env, ppo.policy.on(CPU, 0), num_steps=1)
    rollout.load(ppo.policy.weights, 0)
    before = rollout.collect()
    for _ in range(12):
        segment = rollout.collect()
        assert segment.memory is not None
        # Environment 0 begins with an observation of zeros, which leaves nothing to remember.
        torch.testing.assert_close(segment.memory.any(dim=1)[1:], ~before.ended[0, 1:])
        before = segment


def test_a_segment_in_the_middle_of_an_episode_needs_its_memory() -> None:
    """So the test above would notice a memory that was lost on the way."""
    _, net, policy = make()
    segment = collected(policy, 2)[1]
    segment.memory = None
    flat = flatten_segments([segment], CPU)
    sequences = Sequences([segment], net.memory_size, 64, CPU)
    seen, _ = sequences.remember(net, net.normalize(flat.obs), net.normalize(flat.boundary_next_obs))
    difference = net.log_prob(net.head(seen), flat.action) - flat.log_prob
    assert difference.abs().max() > 1e-4


def test_the_value_after_the_last_step_is_seen_with_the_memory_of_the_episode() -> None:
    _, net, policy = make()
    segments = collected(policy, 2)
    flat = flatten_segments(segments, CPU)
    boundary_obs = net.normalize(flat.boundary_next_obs)
    sequences = Sequences(segments, net.memory_size, 3, CPU)
    seen, after = sequences.remember(net, net.normalize(flat.obs), boundary_obs)
    expected = []
    for row, obs in zip(flat.boundary.tolist(), boundary_obs, strict=True):
        output, _ = net.unroll(obs[None, None], seen[row : row + 1, net.row_size :])
        expected.append(torch.cat([obs, output[0, 0]]))
    torch.testing.assert_close(after, torch.stack(expected))


def test_gradients_flow_back_as_far_as_a_sequence() -> None:
    """The last row of an episode depends on its first observation, if both are in one sequence."""
    _, net, policy = make()
    episode = whole_episodes(policy)[0]
    flat = flatten_segments([episode], CPU)
    last = torch.tensor([episode.num_steps - 1])
    for sequence_steps, reaches in ((64, True), (2, False)):
        sequences = Sequences([episode], net.memory_size, sequence_steps, CPU)
        obs = flat.obs.clone().requires_grad_()
        sequences.remember(net, obs, flat.boundary_next_obs)
        sequences.seen(net, last)[:, net.row_size :].sum().backward()  # type: ignore[no-untyped-call]
        assert obs.grad is not None
        assert bool(obs.grad[0].any()) == reaches


def test_a_burn_in_renews_what_is_remembered_at_the_start_of_a_sequence() -> None:
    """After a change of the weights, memories that were computed before are stale; those of a burn-in less so."""
    _, net, policy = make()
    episode = max(whole_episodes(policy), key=lambda segment: segment.num_steps)
    flat = flatten_segments([episode], CPU)
    every_sequence = []
    for sequence_steps, burn_in in ((3, 0), (3, 2), (64, 0)):
        sequences = Sequences([episode], net.memory_size, sequence_steps, CPU, burn_in)
        sequences.remember(net, flat.obs, flat.boundary_next_obs)
        every_sequence.append(sequences)
    with torch.no_grad():
        net.memory.get_parameter("weight_ih_l0").add_(0.5)
        stale, renewed, true = (one.seen(net, torch.arange(episode.num_steps)) for one in every_sequence)
    assert episode.num_steps > 6
    assert (renewed - true).abs().max() < 0.7 * (stale - true).abs().max()
    torch.testing.assert_close(renewed[:3], true[:3])


def test_minibatches_hold_every_row_once_an_epoch_and_whole_sequences() -> None:
    _, net, policy = make()
    segments = collected(policy, 4)
    sequences = Sequences(segments, net.memory_size, 5, CPU)
    num_rows = sum(segment.num_steps for segment in segments)
    joined = JoinedRows(SingleLearner(), [SegmentSize(0, 0, num_rows)], CPU)
    every_sequence = sequences.of_all(SingleLearner(), joined)
    drawn = list(draw_sequences(*every_sequence, 20, 2, torch.Generator().manual_seed(0)))
    assert len(drawn) == 2 * round(num_rows / 20)
    for epoch in (drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(num_rows))
    # No sequence is longer than 5 steps, so a minibatch is at most one longer sequence away from its share.
    assert all(abs(len(rows) - num_rows / round(num_rows / 20)) <= 5 for rows in drawn)


@pytest.mark.parametrize("lag_correction", ["decoupled", "vtrace"])
def test_lag_is_corrected_with_the_memory(lag_correction: Any) -> None:
    """Steps of the newest weights have importance weights of 1; a step of other weights that chose the same has too."""
    ppo, _, policy = make(lag_correction=lag_correction, learning_rate=1e-12, num_epochs=1, normalize_reward=False)
    for version in (0, 1):
        ppo.observe(collected(policy, 2))
        metrics = ppo.update(version, 0.0)
        assert metrics["approx_kl"] < 1e-10
        assert metrics["clip_fraction"] == 0
        assert metrics["bad_gradients"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_gpu_learns_what_a_cpu_learns(kind: MemoryKind) -> None:
    updated = []
    for device in ("cpu", "cuda"):
        config = PPOConfig(memory=kind, memory_size=8, hidden_sizes=(8,), sequence_steps=3, num_epochs=1, burn_in=1)
        ppo = PPO(MAZE.spec, config, 0, device, False)
        assert isinstance(ppo.policy, MemoryActor)
        ppo.observe(collected(ppo.policy, 3))
        # One minibatch, because a GPU shuffles in another order.
        ppo.update(0, 0.0)
        updated.append(ppo.policy.weights.copy())
    np.testing.assert_allclose(updated[0], updated[1], atol=1e-4)


def test_settings_that_do_not_go_with_a_memory_are_refused() -> None:
    with pytest.raises(UserError, match="--memory goes with an MLP: leave --network toy_networks:linear out"):
        PPOConfig(memory="gru", network="toy_networks:linear")
    space = spaces.Box(0, 255, (12, 12, 3), np.uint8)
    pixels = EnvSpec(space, spaces.Discrete(2), images=(ImagePart(0, (12, 12, 3)),))
    with pytest.raises(UserError, match="--memory goes with an MLP, and images get another network"):
        PPO(pixels, PPOConfig(memory="gru"), 0, "cpu", True)
    with pytest.raises(UserError, match="--learner fast is for MLPs without a memory"):
        make(learner="fast")
    with pytest.raises(UserError, match="--burn-in is for policies with a memory"):
        PPOConfig(burn_in=4)
    with pytest.raises(UserError, match="--memory-size must be"):
        PPOConfig(memory="gru", memory_size=0)
    with pytest.raises(UserError, match="--burn-in must be at least 0 and below --sequence-steps"):
        PPOConfig(memory="gru", burn_in=64)
    with pytest.raises(UserError, match="--sequence-steps must be"):
        PPOConfig(memory="gru", sequence_steps=0)
