"""Several learners, in processes of their own, against one that has everything."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from learner_processes import share, together

from freerun.core import EnvSpec, LearnerGroup, Metrics, RingBuffer, Segment, SingleLearner, UserError
from freerun.settings import registry

ENV = EnvSpec(spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Box(-2.0, 2.0, (1,), np.float32))
CHOICES = EnvSpec(ENV.observation_space, spaces.Discrete(3))
LENGTHS = ((7, 3, 12, 1, 5), (9, 2, 6, 4, 4), (11, 8, 3, 2, 1))
LONELY = ((20,), (25,), (21,))
NETWORK = {"hidden_sizes": (8, 8)}
SAC = {
    **NETWORK,
    "buffer_size": 500,
    "batch_size": 17,
    "learning_starts": 20,
    "steps_per_update": 20,
    "learning_rate": 1e-2,
}
MBPO = {
    **SAC,
    "model_hidden_sizes": (8,),
    "num_models": 3,
    "num_elites": 2,
    "updates_per_step": 1.0,
    "rollouts_per_step": 3.0,
    "rollout_length": 2,
    "model_batch_size": 7,
    "steps_per_model_training": 25,
    "stages": "in-turn",
}
CASES: dict[str, tuple[str, dict[str, Any], EnvSpec]] = {
    "ppo": ("ppo", {**NETWORK, "steps_per_update": 20, "minibatch_size": 4, "num_epochs": 2}, ENV),
    "ppo, everything on": (
        "ppo",
        {
            **NETWORK,
            "episodes_per_update": 5,
            "minibatch_size": 8,
            "normalize_obs": True,
            "normalize_reward": True,
            "entropy_coef": 0.01,
            "anneal_learning_rate": True,
            "lag_correction": "vtrace",
            "max_grad_norm": 0.1,
        },
        CHOICES,
    ),
    "ppo, stopped early": (
        "ppo",
        {**NETWORK, "episodes_per_update": 5, "target_kl": 0.02, "learning_rate": 1e-2, "minibatch_size": 8},
        CHOICES,
    ),
    "ppo, with a memory": (
        "ppo",
        {
            **NETWORK,
            "steps_per_update": 20,
            "minibatch_size": 8,
            "memory": "gru",
            "memory_size": 4,
            "sequence_steps": 3,
            "burn_in": 1,
        },
        CHOICES,
    ),
    "sac": ("sac", SAC, ENV),
    "sac, prioritised": ("sac", {**SAC, "replay": "prioritised"}, ENV),
    "fastsac": ("fastsac", SAC, ENV),
    "dqn": ("dqn", SAC, CHOICES),
    "dqn, prioritised": ("dqn", {**SAC, "replay": "prioritised", "max_grad_norm": 0.1}, CHOICES),
    "mbpo": ("mbpo", MBPO, ENV),
}

LONELY_CASES = ("ppo", "ppo, with a memory")


def played(env: EnvSpec, number: int, length: int, version: int, log_prob: float) -> Segment:
    """An episode of random numbers, by its own number."""
    rng = np.random.default_rng(number)
    column = (length, 1)
    action = rng.integers(0, 3, column) if env is CHOICES else rng.uniform(-2, 2, (*column, 1)).astype(np.float32)
    terminated = np.zeros(column, np.bool_)
    terminated[-1] = number % 2
    obs = rng.normal(size=(length + 1, 1, 3)).astype(np.float32) * 3 + 1
    return Segment(
        obs=obs[:-1],
        action=action,
        log_prob=rng.normal(log_prob, 0.1, column).astype(np.float32),
        reward=rng.normal(size=column).astype(np.float32),
        terminated=terminated,
        truncated=(np.arange(length) == length - 1)[:, None] & ~terminated,
        next_obs=obs[1:],
        version=np.full(column, max(0, version - number % 2)),
        episode=np.full(column, number),
        seconds=0.0,
    )


def learn(
    group: LearnerGroup, case: str, lengths: Sequence[Sequence[int]]
) -> tuple[list[np.ndarray[Any, Any]], Metrics, Any]:
    """Weights after each update, the last metrics, and the state of what is random."""
    algo, options, env = CASES[case]
    config = registry.make_config({"env": "toy", "algo": algo, **options}).algorithm
    algorithm = registry.ALGORITHMS[algo].load()(env, config, 3, "cpu", True, group)
    weights, number = [], 0
    for version, round_lengths in enumerate(lengths):
        episodes = [
            played(env, number + place, length, version, -1.1 if env is CHOICES else -1.5)
            for place, length in enumerate(round_lengths)
        ]
        number += len(episodes)
        assert algorithm.demand()
        algorithm.observe([segment for segment in episodes if segment.episode[0, 0] % group.count == group.index])
        assert not algorithm.demand()
        metrics = algorithm.update(version, version / len(lengths))
        weights.append(algorithm.policy.weights.copy())
    return weights, metrics, algorithm.state_dict()


def assert_alike(one: Any, other: Any, where: str = "state") -> None:
    """Nested state to float tolerance; numbers of pieces of work, and random states, exactly."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_alike(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, (list, tuple)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_alike(a, b, f"{where}[{place}]")
    elif isinstance(one, RingBuffer):
        assert one.total == other.total
        for (_, mine), (_, theirs) in zip(one.pieces(), other.pieces(), strict=True):
            assert_alike(dict(mine), dict(theirs), where)
    elif one is not None and not isinstance(one, (bool, str)):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-4, atol=2e-6, err_msg=where)


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of the learners comes to in every case: starting them takes longer than all of these."""
    return found_by(request.param)


@functools.cache  # pytest may come back to a number of learners after the other one
def found_by(num_learners: int) -> list[dict[str, Any]]:
    return together(num_learners, learn_all)


def learn_all(group: LearnerGroup) -> dict[str, Any]:
    alone = {f"lonely, {case}": learn(group, case, LONELY) for case in LONELY_CASES}
    return {case: learn(group, case, LENGTHS) for case in CASES} | alone


@pytest.mark.parametrize("case", CASES)
def test_they_learn_what_one_would_from_all_they_have(case: str, found: list[dict[str, Any]]) -> None:
    weights, metrics, state = learn(SingleLearner(), case, LENGTHS)
    assert not np.array_equal(weights[0], weights[-1])
    for theirs, their_metrics, their_state in [results[case] for results in found]:
        for version, (mine, shared) in enumerate(zip(weights, theirs, strict=True)):
            np.testing.assert_allclose(shared, mine, rtol=1e-4, atol=1e-6, err_msg=f"version {version}")
        assert_alike(state, their_state)
        for name, value in metrics.items():
            if "per_second" not in name:
                assert their_metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name
        np.testing.assert_array_equal(theirs[-1], found[0][case][0][-1])  # among themselves, to the last bit
    if case == "ppo, stopped early":
        assert 0 < metrics["num_gradient_steps"] < 10 * 3


@pytest.mark.parametrize("case", LONELY_CASES)
def test_a_learner_may_have_no_part_of_an_update(case: str, found: list[dict[str, Any]]) -> None:
    weights, _, _ = learn(SingleLearner(), case, LONELY)
    for theirs, _, _ in [results[f"lonely, {case}"] for results in found]:
        np.testing.assert_allclose(theirs[-1], weights[-1], rtol=1e-4, atol=1e-6)


class Three(SingleLearner):
    count = 3


@pytest.mark.parametrize(
    ("algo", "options", "advice"),
    [
        ("sac", {**SAC, "batch_size": 2}, "--batch-size"),
        ("sac", {**SAC, "acceleration": "graph"}, "--acceleration none"),
        ("mbpo", {**MBPO, "model_batch_size": 2}, "--model-batch-size"),
    ],
)
def test_what_several_learners_cannot_do_is_said_at_once(algo: str, options: dict[str, Any], advice: str) -> None:
    config = registry.make_config({"env": "toy", "algo": algo, **options}).algorithm
    with pytest.raises(UserError, match=advice):
        registry.ALGORITHMS[algo].load()(ENV, config, 3, "cpu", True, Three())


def test_stages_of_mbpo_take_turns() -> None:
    config = registry.make_config({"env": "toy", "algo": "mbpo", **MBPO, "stages": "concurrent"}).algorithm
    with pytest.raises(UserError, match="--stages in-turn"):
        registry.ALGORITHMS["mbpo"].load()(ENV, config, 3, "cpu", False, Three())


def test_things_are_gathered_in_order_and_sums_are_the_same_everywhere() -> None:
    found = together(3, gather_and_sum)
    assert all(gathered == [[0, 3], [1], [2]] for gathered, _ in found)
    assert len({total for _, total in found}) == 1


def gather_and_sum(group: LearnerGroup) -> tuple[list[list[int]], bytes]:
    import torch

    numbers = torch.rand(1001, generator=torch.Generator().manual_seed(group.index))
    group.sum(numbers)
    return group.gather(share(group, [0, 1, 2, 3])), numbers.numpy().tobytes()
