"""Randomness belongs to the episode: the seed of the run and its number say all."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SERIES_BITS = 40
"""Episodes of the k-th training over one pool of workers are numbered from k · 2^40 on: so the workers need not be told
that another training has begun."""
SERIES_SEED_BITS = 32
"""And their environments are reset with seeds whose bits from here on are k: that is how they know which one it is."""


class SharedSeed(NamedTuple):
    """The seed of a run with several learners: each plays every `num_learners`-th episode and counts its own."""

    run_seed: int
    learner: int
    num_learners: int

    def number(self, episode: Any) -> Any:
        """An episode's number in the run."""
        return episode * self.num_learners + self.learner


RunSeed = int | SharedSeed


def episode_seed(run_seed: RunSeed, episode: int) -> int:
    """The seed that the environment of an episode is reset with (decision 5: randomness belongs to the episode)."""
    seed = int(np.random.SeedSequence(_in_run(run_seed, episode)).generate_state(1)[0] >> 1)
    return episode >> SERIES_BITS << SERIES_SEED_BITS | seed


def episode_rng(run_seed: RunSeed, episode: int) -> np.random.Generator:
    """The generator that samples an episode's actions."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*_in_run(run_seed, episode), 1))))


def _in_run(run_seed: RunSeed, episode: int) -> tuple[int, int]:
    """The run's seed, and the episode's number in its own training, which thus meets the same episodes as if it were
    the only one."""
    number = episode & (1 << SERIES_BITS) - 1
    if isinstance(run_seed, SharedSeed):
        return run_seed.run_seed, run_seed.number(number)
    return run_seed, number
