"""What only `batch` does: one collector, a queue of batches, and a collector that waits when it is full."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import freerun
from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
from freerun.collecting.modes.batch import Batch, BatchConfig
from freerun.core import CollectorSettings, Demand, UserError

SETTINGS: dict[str, Any] = {"num_epochs": 1, "minibatch_size": 5000, "quiet": True}


@contextmanager
def collecting(config: BatchConfig, max_lag: int | None) -> Iterator[Batch]:
    factory = GymnasiumFactory("toy_envs:Audit")
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    collector = Batch(factory, policy, CollectorSettings(1, max_lag, seed=3), config)
    try:
        collector.publish(policy.weights, 0)
        yield collector
    finally:
        collector.close()


def wait_until_full(collector: Batch, num_waiting: int, steps: int) -> None:
    deadline = time.monotonic() + 20
    while collector.counts().steps_delivered < steps:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)  # if it did not wait now, more would arrive
    assert collector.counts().steps_delivered == steps
    assert collector.counts().queue_fill == num_waiting / 3


@pytest.mark.parametrize(("max_lag", "num_waiting"), [(None, 3), (9, 3), (2, 2), (0, 0)])
def test_the_collector_waits_when_the_queue_is_full_or_the_lag_used_up(max_lag: int | None, num_waiting: int) -> None:
    with collecting(BatchConfig(num_envs=4, num_steps_per_env=5, max_queue_size=3), max_lag) as collector:
        batches = collector.collect(Demand(steps=20))
        assert [batch.reward.shape for batch in batches] == [(5, 4)]
        wait_until_full(collector, num_waiting, 20 * (1 + num_waiting))
        collector.collect(Demand(steps=40))
        wait_until_full(collector, min(num_waiting * 2, 3), 20 * (3 + min(num_waiting * 2, 3)))
        assert collector.counts().steps_dropped == 0


def test_without_a_limit_to_the_lag_what_is_taken_makes_room() -> None:
    """An algorithm that has no demand takes what has arrived: the collector goes on all the same."""
    with collecting(BatchConfig(num_envs=4, num_steps_per_env=5, max_queue_size=3), None) as collector:
        collector.collect(Demand(steps=20))
        wait_until_full(collector, 3, 80)
        assert len(collector.collect(Demand())) == 3
        wait_until_full(collector, 3, 140)


def test_ppo_trains_within_the_lag_and_on_long_episodes_as_often_as_they_occur(run_dir: Path) -> None:
    result = freerun.train(
        "toy_envs:Audit", mode="v2", num_envs=20, num_steps_per_env=50, max_lag=4, steps_per_update=2000,
        total_steps=100_000, run_dir=run_dir, **SETTINGS
    )  # fmt: skip
    assert result.summary["mode"] == "batch"
    assert result.summary["lag_max"] <= 4
    assert result.summary["dropped_steps"] == 0
    ledger = result.summary["ledger"]
    assert ledger["started"] == ledger["trained"] + ledger["handed_over_untrained"]
    long, short = (ledger["episodes_by_length"][length] for length in ("200", "20"))
    # Of 900 episodes half are long (± 0.017, one sigma); those unfinished at the end, up to 20, are mostly long.
    assert 0.43 < long / (long + short) < 0.56


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 2}, "--mode batch has one collector, not 2 workers"),
        ({"num_steps_per_env": 0}, "--num-steps-per-env must be at least 1, not 0"),
        (
            {"num_collectors": 2},
            "belongs to --mode continuous; --mode batch has --num-envs, --num-steps-per-env, --max-queue-size",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=message):
        freerun.train("CartPole-v1", mode="batch", run_dir=run_dir, **settings)
    assert not run_dir.exists()
