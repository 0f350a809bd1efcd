"""Where randomness comes from. The seed of the run and the number of an episode decide everything about the episode."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

# Several trainings may follow each other with the same workers: a series. Training k numbers its episodes from
# k * 2^40, so the workers need not be told that another training has begun. The environments of training k are reset
# with seeds whose bits from 32 on are k: an environment that differs between the trainings reads there which one it
# serves. Both numbers are part of checkpoints, ledgers and recorded runs: they never change.
_EPISODE_BITS = 40
_SEED_BITS = 32


def first_episode_of(training: int) -> int:
    """Return the number of the first episode of the k-th training in a series; a single training is number 0."""
    return training << _EPISODE_BITS


def training_of(episode: int) -> int:
    """Return which training of a series an episode belongs to."""
    return episode >> _EPISODE_BITS


def split_seed(seed: int) -> tuple[int, int]:
    """Split the seed that an environment is reset with into the number of the training and the rest."""
    return seed >> _SEED_BITS, seed & (1 << _SEED_BITS) - 1


class SharedSeed(NamedTuple):
    """The seed of a run with several learners. Learner i plays every `num_learners`-th episode and counts its own."""

    run_seed: int
    learner: int
    num_learners: int

    def number(self, episode: Any) -> Any:
        """Return the number that the learner's own episode (or an array of them) has in the whole run."""
        return episode * self.num_learners + self.learner


class Purpose(IntEnum):
    """What episodes that no learner trains on are played for. The numbers are part of the seeds: they never change."""

    VALIDATION = 1
    """The evaluations of --eval-every, whose results decide which checkpoint is the best."""
    EVALUATION = 2
    """Reports on a finished policy. They must not use the episodes by which the policy was chosen."""


class HeldOutSeed(NamedTuple):
    """The seed of episodes that no learner trains on. Each purpose has random numbers of its own."""

    run_seed: int
    purpose: Purpose


class RepeatedSeed(NamedTuple):
    """The seed of a run whose workers may serve others after it, on environments that are the same in all of them.

    Environments are reset with the seeds of a run that has its workers for itself: they carry no number of a training.
    """

    run_seed: int


RunSeed = int | SharedSeed | HeldOutSeed | RepeatedSeed


def episode_seed(run_seed: RunSeed, episode: int) -> int:
    """Return the seed that the environment of an episode is reset with."""
    # One bit fewer than the 32 that numpy returns, because some environments take only signed 32-bit seeds.
    seed = int(_seed_sequence(run_seed, episode).generate_state(1)[0] >> 1)
    return seed if isinstance(run_seed, RepeatedSeed) else training_of(episode) << _SEED_BITS | seed


def episode_rng(run_seed: RunSeed, episode: int) -> np.random.Generator:
    """Return the generator that samples the actions of an episode."""
    return np.random.Generator(np.random.PCG64(_seed_sequence(run_seed, episode, 1)))


def _seed_sequence(run_seed: RunSeed, episode: int, *more: int) -> np.random.SeedSequence:
    # The number within its own training counts: each training of a series meets the episodes that it would meet alone.
    number = episode - first_episode_of(training_of(episode))
    if isinstance(run_seed, HeldOutSeed):
        # A spawn key, unlike one more number of the entropy, cannot give the sequence of any training run.
        return np.random.SeedSequence((run_seed.run_seed, number, *more), spawn_key=(int(run_seed.purpose),))
    if isinstance(run_seed, SharedSeed):
        return np.random.SeedSequence((run_seed.run_seed, run_seed.number(number), *more))
    own_seed = run_seed.run_seed if isinstance(run_seed, RepeatedSeed) else run_seed
    return np.random.SeedSequence((own_seed, number, *more))
