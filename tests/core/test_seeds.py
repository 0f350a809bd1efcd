"""Seeds belong to an episode: its run, its number, and what it is played for."""

from __future__ import annotations

import pytest

from freerun.core import (
    HeldOutSeed,
    Purpose,
    RepeatedSeed,
    RunSeed,
    episode_rng,
    episode_seed,
    first_episode_of,
    split_seed,
    training_of,
)


def seeds_of(run_seed: RunSeed, num_episodes: int = 500) -> set[int]:
    return {episode_seed(run_seed, number) for number in range(num_episodes)}


@pytest.mark.parametrize("run_seed", [0, 1, 1 << 32, (1 << 63) - 1])
def test_episodes_of_different_purposes_have_different_seeds(run_seed: int) -> None:
    training = seeds_of(run_seed)
    validation, evaluation = (seeds_of(HeldOutSeed(run_seed, purpose)) for purpose in Purpose)
    assert len(training | validation | evaluation) == 1500
    every: list[RunSeed] = [run_seed, *(HeldOutSeed(run_seed, purpose) for purpose in Purpose)]
    draws = {float(episode_rng(seed, 3).random()) for seed in every}
    assert len(draws) == 3


def test_no_seed_of_another_run_leads_to_held_out_episodes() -> None:
    held_out = seeds_of(HeldOutSeed(0, Purpose.EVALUATION), 20) | seeds_of(HeldOutSeed(0, Purpose.VALIDATION), 20)
    assert not held_out & seeds_of(1_000_003, 20)


def test_seeds_of_training_are_those_of_earlier_versions() -> None:
    """Or a recorded run could not be replayed."""
    assert [episode_seed(7, number) for number in range(2)] == [1_041_839_916, 184_785_996]


def test_the_trainings_of_a_series_meet_the_same_episodes_under_seeds_that_name_the_training() -> None:
    """The numbers are part of checkpoints: training k begins at episode k * 2^40, and its seeds carry k from bit 32."""
    assert first_episode_of(3) == 3 << 40
    for episode in range(3):
        later = first_episode_of(3) + episode
        assert training_of(later) == 3
        assert split_seed(episode_seed(7, later)) == (3, episode_seed(7, episode))
        assert episode_rng(7, later).random() == episode_rng(7, episode).random()


def test_where_all_trainings_have_the_same_environments_their_seeds_are_the_same_too() -> None:
    third = first_episode_of(3)
    assert episode_seed(RepeatedSeed(7), third + 1) == episode_seed(RepeatedSeed(7), 1) == episode_seed(7, 1)
    assert episode_rng(RepeatedSeed(7), third).random() == episode_rng(7, 0).random()
