"""Scripted defenders to compare a trained one with. They see what it sees: the 52 bits of an observation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from freerun.core import Array, RunSeed, episode_rng, episode_seed

NUM_HOSTS, BITS_PER_HOST = 13, 4
# Sleep, Monitor, 13 Analyse, 13 Remove and 8 × 13 decoys come before the first Restore: 2 + 10 × 13 = 132.
NUM_ACTIONS, FIRST_RESTORE = 145, 132  # as numbered in CAGE challenge 2
Actions = NDArray[np.int64]
Defender = Callable[[Array, Actions], Actions]
"""A function of observations [N, 52 or more] and of one uniformly drawn action for each; it returns actions [N]."""


def sleep(obs: Array, drawn: Actions) -> Actions:
    return np.zeros_like(drawn)


def uniformly_random(obs: Array, drawn: Actions) -> Actions:
    return drawn


def restore_on_sight(obs: Array, drawn: Actions) -> Actions:
    """Restore the first host whose last two bits say that it may be compromised; if there is none, sleep."""
    bits = obs[:, : NUM_HOSTS * BITS_PER_HOST].reshape(-1, NUM_HOSTS, BITS_PER_HOST)
    is_suspect = bits[:, :, 2:].max(axis=2) > 0
    return np.where(is_suspect.any(axis=1), FIRST_RESTORE + is_suspect.argmax(axis=1), 0)


DEFENDERS: dict[str, Defender] = {"sleep": sleep, "random": uniformly_random, "restore on sight": restore_on_sight}


def play(env: gymnasium.Env[Any, Any], defender: Defender, seed: RunSeed, num_episodes: int) -> list[float]:
    """The returns of the episodes that a trained policy would be evaluated on with this seed."""
    returns = []
    for episode in range(num_episodes):
        rng = episode_rng(seed, episode)
        obs, _ = env.reset(seed=episode_seed(seed, episode))
        total, ended = 0.0, False
        while not ended:
            action = defender(obs[None], rng.integers(NUM_ACTIONS, size=1))[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    return returns
