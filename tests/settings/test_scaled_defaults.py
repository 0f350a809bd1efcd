"""Sizes that were left open grow with the environments that run at once."""

from __future__ import annotations

from typing import Any

import pytest

from freerun.core import UserError
from freerun.settings.config import AnyConfig
from freerun.settings.defaults import complete
from freerun.settings.registry import flatten_config, make_config


def completed(**settings: Any) -> AnyConfig:
    return complete(make_config({"env": "CartPole-v1", "num_workers": 1, **settings}))


def sizes(config: AnyConfig) -> tuple[int, int, int, float]:
    found = config.algorithm
    return found.steps_per_update, found.minibatch_size, found.num_epochs, found.learning_rate


ONE = (2048, 64, 10, 3e-4)


@pytest.mark.parametrize(
    ("settings", "expected", "segment_steps"),
    [
        ({}, ONE, 0),
        ({"num_workers": 4}, ONE, 0),
        # 2048 // 8 = 256 steps of each environment are an update.
        ({"num_workers": 8}, ONE, 256),
        ({"num_workers": 2, "envs_per_worker": 32}, ONE, 32),
        # 24 steps of each of 128 environments are 3072, in 32 minibatches of 96; 3e-4 * sqrt(96 / 64) = 3.67e-4.
        ({"num_workers": 128}, (3072, 96, 10, 3.67e-4), 24),
        # 24 * 2048 = 49152, in 32 minibatches of 1536; 3e-4 * sqrt(24) = 1.47e-3 is above the limit.
        ({"num_workers": 64, "envs_per_worker": 32}, (49152, 1536, 10, 1e-3), 24),
        ({"num_workers": 128, "mode": "pipes"}, (3072, 96, 10, 3.67e-4), None),
    ],
)
def test_they_follow_from_the_number_of_environments(
    settings: dict[str, Any], expected: tuple[int, int, int, float], segment_steps: int | None
) -> None:
    config = completed(**settings)
    assert sizes(config) == (*expected[:3], pytest.approx(expected[3], abs=1e-6))
    assert config.collector.segment_steps == segment_steps


def test_they_are_written_down_and_stay_when_completed_again() -> None:
    """A resumed run is completed again, perhaps with another number of workers: what it learns with stays."""
    config = completed(num_workers=128)
    again = complete(make_config({**flatten_config(config), "num_workers": 2}))
    assert sizes(again) == sizes(config)
    assert again.collector.segment_steps == 24


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps_per_update": 512}, (512, 96, 10, 3.67e-4)),
        ({"minibatch_size": 64}, (3072, 64, 10, 3e-4)),
        ({"learning_rate": 1e-4, "num_epochs": 3}, (3072, 96, 3, 1e-4)),
    ],
)
def test_what_was_given_wins(given: dict[str, Any], expected: tuple[int, int, int, float]) -> None:
    assert sizes(completed(num_workers=128, **given)) == (*expected[:3], pytest.approx(expected[3], abs=1e-6))


def test_a_deterministic_run_does_not_depend_on_the_number_of_workers() -> None:
    config = completed(num_workers=128, deterministic=True)
    assert sizes(config) == ONE
    assert config.collector.segment_steps == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"episodes_per_update": 40},
        {"segment_steps": 0},
        {"adapt": True},
        {"steps_per_update": 100_000},  # 781 steps of each environment: whole episodes are as good
        {"algo": "sac", "env": "Pendulum-v1"},
    ],
)
def test_whole_episodes_are_handed_over_where_segments_do_not_pay(settings: dict[str, Any]) -> None:
    assert completed(num_workers=128, **settings).collector.segment_steps == 0


def test_given_segments_are_kept() -> None:
    assert completed(num_workers=128, segment_steps=7).collector.segment_steps == 7
    with pytest.raises(UserError, match="--segment-steps must be 0 or more, not -1"):
        completed(segment_steps=-1)


def test_tensors_learn_in_a_few_large_minibatches() -> None:
    """4,096 environments of 24 steps: four minibatches of 24,576 rows, five times over."""
    config = completed(env="freerun/RoughDrone-v0", mode="batch", num_envs=4096, num_workers=None)
    assert sizes(config) == (98304, 24576, 5, 1e-3)
