"""An environment whose observations prove where they belong: episode, step, and a checksum over both."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

HALF_WORD = 1 << 16
REQUEST = "request"
VICTIM_SECONDS = 60.0
"""A victim that nobody kills goes on after this time."""
WIDTH = 5
"""Seed (two half words), step, checksum (two): each divided by 2^16, which a float32 holds exactly."""


class Sealed(gymnasium.Env[Any, Any]):
    """Episodes of 10 to 60 steps, by their seed; ended by truncation or termination, half each.

    With `victims`, a folder, whoever wants to kill a worker in the middle of a step can ask for one (`ask_for_victim`).
    """

    def __init__(self, step_seconds: float = 0.0, shortest: int = 10, longest: int = 60, victims: str | None = None):
        self.observation_space = spaces.Box(0.0, 1.0, (WIDTH,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._step_seconds = step_seconds
        self._lengths = (shortest, longest + 1)
        self._victims = None if victims is None else Path(victims)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self._seed, self._step = seed & 0xFFFFFFFF, 0
        self._length = int(self.np_random.integers(*self._lengths))
        self._by_truncation = bool(self.np_random.integers(2))
        return seal(np.array([self._seed]), np.array([0]))[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._victims is not None:
            wait_to_be_killed(self._victims)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._step += 1
        ended = self._step == self._length
        obs = seal(np.array([self._seed]), np.array([self._step]))[0]
        return obs, float(self._step), ended and not self._by_truncation, ended and self._by_truncation, {}


def ask_for_victim(folder: Path, seconds: float) -> int | None:
    """The process of a worker that is in a step now and stays there until it is killed; None if nobody came."""
    (folder / REQUEST).touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for victim in folder.glob("victim-*"):
            victim.unlink()
            return int(victim.name.partition("-")[2])
        time.sleep(0.005)
    (folder / REQUEST).unlink(missing_ok=True)
    return None


def wait_to_be_killed(folder: Path) -> None:
    """Within a step: if somebody asks for a victim, be that one. Of several workers only one can rename the file."""
    try:
        os.rename(folder / REQUEST, folder / f"victim-{os.getpid()}")
    except FileNotFoundError:
        return
    time.sleep(VICTIM_SECONDS)


def seal(seeds: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.float32]:
    """The observations of these steps of the episodes with these seeds."""
    sums = [zlib.crc32(f"{seed} {step}".encode()) for seed, step in zip(seeds.tolist(), steps.tolist(), strict=True)]
    crc = np.array(sums, np.int64)
    columns = [seeds // HALF_WORD, seeds % HALF_WORD, steps, crc // HALF_WORD, crc % HALF_WORD]
    return (np.stack(columns, axis=1) / HALF_WORD).astype(np.float32)


def read_seal(obs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Seeds and steps of observations, [N, 5]; raises if one is torn."""
    words = (obs.astype(np.float64) * HALF_WORD).astype(np.int64)
    seeds, steps = words[:, 0] * HALF_WORD + words[:, 1], words[:, 2]
    torn = (seal(seeds, steps) != obs).any(axis=1)
    if torn.any():
        raise AssertionError(f"torn observations: {words[torn][:3].tolist()}")
    return seeds, steps
