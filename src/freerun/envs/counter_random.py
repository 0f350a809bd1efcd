"""Random numbers as a function of (key, counter): the same on every device, for any number of rows, without a state.

Each row of a batch has a key of its own and counts what it has drawn, so that its numbers do not depend on its
neighbours; and a captured CUDA graph that is replayed goes on drawing new ones. Each row's numbers are a SplitMix64
stream (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def keys_from(seed: int | Sequence[int], num_rows: int) -> Tensor:
    """One key for each row, [num_rows] int64: from one seed for all, or from one for each."""
    if isinstance(seed, int):
        words = np.random.SeedSequence(seed).generate_state(num_rows, np.uint64)
    elif len(seed) != num_rows:
        raise ValueError(f"{len(seed)} seeds for {num_rows} environments")
    else:
        words = np.array([np.random.SeedSequence(one).generate_state(1, np.uint64)[0] for one in seed], np.uint64)
    return torch.from_numpy(words.view(np.int64))


def mix(number: Tensor) -> Tensor:
    """A permutation of the 64-bit integers whose output looks random for any input."""
    number = (number ^ _shift(number, 30)) * FIRST
    number = (number ^ _shift(number, 27)) * SECOND
    return number ^ _shift(number, 31)


def _shift(number: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros: that of a signed tensor fills with its sign."""
    return (number >> bits) & ((1 << 64 - bits) - 1)


def uniforms(key: Tensor, counter: Tensor, lanes: Tensor) -> Tensor:
    """Floats in [0, 1), [rows, lanes]; `lanes` is 0, 1, 2, … on the device of the others."""
    number = mix(key[:, None] + (counter[:, None] * len(lanes) + lanes + 1) * GOLDEN)
    return _shift(number, 40).float() * 2.0**-24
