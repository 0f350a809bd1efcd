"""Sizes that were left open grow with the environments that run at once."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from freerun.core import UserError
from freerun.settings.config import AnyConfig, TrainConfig
from freerun.settings.defaults import complete
from freerun.settings.flag_parsing import SWITCHES, spell_out_switches
from freerun.settings.registry import ALGORITHMS, MODES, flatten_config, make_config


def completed(**settings: Any) -> AnyConfig:
    return complete(make_config({"env": "CartPole-v1", "num_workers": 1, **settings}))


def sizes(config: AnyConfig) -> tuple[int, int, int, float]:
    found = config.algorithm
    return found.steps_per_update, found.minibatch_size, found.num_epochs, found.learning_rate


ONE, MANY = (2048, 64, 10, 3e-4), (2048, 256, 10, 6e-4)


@pytest.mark.parametrize(
    ("settings", "expected", "segment_steps"),
    [
        ({}, ONE, 0),
        ({"num_workers": 4}, MANY, 0),
        # 8 minibatches of 256; 3e-4 * sqrt(256 / 64) = 6e-4. Two updates hold 2 * 2048 // 8 = 512 steps of each.
        ({"num_workers": 8}, MANY, 512),
        ({"num_workers": 2, "envs_per_worker": 32}, MANY, 64),
        ({"num_workers": 100}, MANY, 40),
        ({"num_workers": 100, "max_lag": 1}, MANY, 20),
        ({"num_workers": 100, "max_lag": 0}, MANY, 20),
        ({"num_workers": 100, "mode": "pipes"}, MANY, None),
        # 12 steps of each of 256 environments are 3072, in 8 minibatches of 384; 3e-4 * sqrt(6) = 7.35e-4.
        ({"num_workers": 256}, (3072, 384, 10, 7.35e-4), 24),
        # 12 * 2048 = 24576, in 8 minibatches of 3072; 3e-4 * sqrt(48) = 2.08e-3 is above the limit.
        ({"num_workers": 64, "envs_per_worker": 32}, (24576, 3072, 10, 1e-3), 24),
    ],
)
def test_they_follow_from_the_number_of_environments(
    settings: dict[str, Any], expected: tuple[int, int, int, float], segment_steps: int | None
) -> None:
    config = completed(**settings)
    assert sizes(config) == pytest.approx(expected, abs=1e-6)
    assert config.collector.segment_steps == segment_steps


def test_they_are_written_down_and_stay_when_completed_again() -> None:
    """A resumed run is completed again, perhaps with another number of workers: what it learns with stays."""
    config = completed(num_workers=256)
    again = complete(make_config({**flatten_config(config), "num_workers": 2}))
    assert sizes(again) == sizes(config)
    assert (again.collector.segment_steps, again.max_lag) == (24, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps_per_update": 512}, (512, 384, 10, 7.35e-4)),
        ({"minibatch_size": 64}, (3072, 64, 10, 3e-4)),
        ({"learning_rate": 1e-4, "num_epochs": 3}, (3072, 384, 3, 1e-4)),
    ],
)
def test_what_was_given_wins(given: dict[str, Any], expected: tuple[int, int, int, float]) -> None:
    assert sizes(completed(num_workers=256, **given)) == pytest.approx(expected, abs=1e-6)


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
        {"steps_per_update": 100_000},  # 1,562 steps of each environment: whole episodes are as good
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


def test_all_but_tensors_are_normalised() -> None:
    assert (completed().algorithm.normalize_obs, completed().algorithm.normalize_reward) == (True, True)
    tensors = completed(env="freerun/RoughDrone-v0", mode="batch", num_workers=None).algorithm
    assert (tensors.normalize_obs, tensors.normalize_reward) == (False, False)
    assert completed(normalize_obs=False).algorithm.normalize_obs is False


def test_advantages_are_scaled_unless_they_are_noisy_and_rewards_are_scaled() -> None:
    """Recurrent policies forgot a solved task, and Hopper learned less from 64 environments."""

    def is_scaled(**settings: Any) -> bool:
        found = completed(**settings).algorithm.normalize_advantage
        assert found is not None
        return bool(found)

    assert is_scaled(num_workers=4)
    assert not is_scaled(num_workers=5)
    assert not is_scaled(num_workers=2, envs_per_worker=32)
    assert not is_scaled(num_workers=1, memory="gru")
    for settings in ({"num_workers": 64}, {"num_workers": 1, "memory": "gru"}):
        assert is_scaled(**settings, normalize_reward=False)
        assert is_scaled(**settings, advantage_rows="update")
        assert is_scaled(**settings, entropy_coef=0.01)
        assert is_scaled(**settings, normalize_advantage=True)
    assert is_scaled(env="freerun/RoughDrone-v0", mode="batch", num_workers=None, memory="gru")


def test_switches_that_may_be_left_open_are_switched_like_others() -> None:
    """The list in `flag_parsing` holds all settings that are True, False or None, and no others."""
    parts: list[Any] = [TrainConfig, *(entry.load_config() for entry in ALGORITHMS.values())]
    parts += [entry.load_config() for entry in MODES.values()]
    open_switches = {
        name
        for part in parts
        for name, kind in get_type_hints(part).items()
        if set(get_args(kind)) == {bool, type(None)}
    }
    assert open_switches == set(SWITCHES)
    words = spell_out_switches(["--seed", "3", "--normalize-obs", "--no-normalize-reward", "--watch"])
    assert words == ["--seed", "3", "--normalize-obs", "True", "--normalize-reward", "False", "--watch"]
    explicit = ["--normalize-obs", "False", "--normalize-reward", "None"]
    assert spell_out_switches(explicit) == explicit


def test_thousands_of_tensors_do_not_each_pay_for_a_gradient_step() -> None:
    """64 gradient steps per step of 4,096 environments are 1/64 per step; MBPO's other work is less by as much."""
    drones = {"env": "freerun/RoughDrone-v0", "mode": "batch", "num_workers": None}
    few = completed(**drones, algo="sac", num_envs=64).algorithm
    assert (few.updates_per_step, few.batch_size) == (1.0, 256)
    many = completed(**drones, algo="sac", num_envs=4096).algorithm
    assert (many.updates_per_step, many.batch_size) == (1 / 64, 8192)
    model = completed(**drones, algo="mbpo", num_envs=640).algorithm
    assert (model.updates_per_step, model.model_updates_per_step, model.rollouts_per_step) == (2.0, 1.0, 40.0)
    assert model.batch_size == 1280
    assert completed(algo="sac", env="Pendulum-v1", num_workers=128).algorithm.updates_per_step == 1.0
