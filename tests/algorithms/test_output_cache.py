"""Observations that come again are looked up; where they do not, nothing is kept for them."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from freerun.algorithms.policies import output_cache
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.algorithms.policies.output_cache import OutputCache
from freerun.core import Array, FloatArray


class Doubling:
    """A forward pass that counts how often it was made."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, obs: Array, output: FloatArray) -> int:
        self.num_calls += 1
        output[...] = 2 * obs
        return self.num_calls


def ask(cache: OutputCache, number: float) -> tuple[float, int]:
    output = np.zeros(1, np.float32)
    prepared = cache(np.array([number], np.float32), output)
    return float(output[0]), prepared


def test_computes_once_until_it_is_cleared() -> None:
    forward = Doubling()
    cache = OutputCache(forward)
    assert [ask(cache, number) for number in (3, 4, 3, 3)] == [(6, 1), (8, 2), (6, 1), (6, 1)]
    cache.clear()
    assert ask(cache, 3) == (6, 3)


def test_what_it_has_put_out_may_be_overwritten() -> None:
    cache, output = OutputCache(Doubling()), np.zeros(1, np.float32)
    cache(np.ones(1, np.float32), output)
    output[...] = 7
    assert ask(cache, 1) == (2, 1)


def test_is_of_no_use_where_observations_do_not_come_again() -> None:
    cache = OutputCache(Doubling())
    for number in range(output_cache.MIN_MISSES_TO_JUDGE - 1):
        ask(cache, number)
    cache.clear()
    assert cache.is_useful  # it has not seen enough
    ask(cache, -1)
    cache.clear()
    assert not cache.is_useful


def test_is_of_use_where_more_than_half_have_come_before() -> None:
    cache = OutputCache(Doubling())
    for number in range(output_cache.MIN_MISSES_TO_JUDGE):
        for _ in range(3):
            ask(cache, number)
    cache.clear()
    assert cache.is_useful


@pytest.mark.parametrize(
    "spec",
    [
        ActorSpec(1, (), "tanh", (2,), 0, False),
        ActorSpec(4, (8,), "tanh", (3, 4), 0, False),
        ActorSpec(52, (8,), "tanh", (145,), 0, False),
        ActorSpec(52, (8,), "tanh", (100, 45), 0, False),
        ActorSpec(600, (8,), "tanh", (), 6, True),
    ],
    ids=["small", "several choices", "many choices", "many choices of two kinds", "Box"],
)
def test_all_that_is_kept_takes_no_more_memory_than_the_rule_allows(spec: ActorSpec) -> None:
    """Keys, arrays, lists and the dictionary's table together, as Python's own allocator counts them; also while the
    dictionary grows."""
    policy = MLPActor(spec, scalar_actions=len(spec.categories) == 1)
    act, head = policy.single(), np.zeros(policy.head_size, np.float32)
    noise = policy.draw(np.random.default_rng(0), 1)[0]
    obs = np.zeros(spec.obs_size, np.float32)
    act(obs, noise, head)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 30_000):
            obs[0] = number
            act(obs, noise, head)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= output_cache.MAX_BYTES
    assert kept >= 0.5 * output_cache.MAX_BYTES, "a rule that is far too careful would waste the memory it may use"


def test_what_has_no_room_is_computed_again() -> None:
    forward = Doubling()
    cache = OutputCache(forward)
    many = output_cache.MAX_BYTES // 64
    for number in range(many):
        ask(cache, number)
    assert forward.num_calls == many
    ask(cache, 0)
    assert forward.num_calls == many
    ask(cache, many - 1)  # had no room
    assert forward.num_calls == many + 1
