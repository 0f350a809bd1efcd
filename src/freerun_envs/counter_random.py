"""Random numbers as a pure function of (key, counter): the same on every device and for any number of rows.

Each row of a batch has a key of its own and counts what it has drawn. So its numbers do not depend on its neighbours,
and a replayed CUDA graph draws new numbers, because the counters are tensors that it increments. The numbers of a row
are a SplitMix64 stream (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# The constants of SplitMix64, minus 2^64: torch has no unsigned 64-bit arithmetic, but signed products wrap around to
# the same bits. The first is 2^64 divided by the golden ratio.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64
SECOND_MULTIPLIER = 0x94D049BB133111EB - 2**64


def keys_from(seed: int | Sequence[int], num_rows: int) -> Tensor:
    """One key for each row, [num_rows] int64, from one seed for all rows or from one seed for each row."""
    if isinstance(seed, int):
        words = np.random.SeedSequence(seed).generate_state(num_rows, np.uint64)
    elif len(seed) != num_rows:
        raise ValueError(f"{len(seed)} seeds for {num_rows} environments")
    else:
        words = np.array([np.random.SeedSequence(one).generate_state(1, np.uint64)[0] for one in seed], np.uint64)
    return torch.from_numpy(words.view(np.int64))


def mix(number: Tensor) -> Tensor:
    """The finalizer of SplitMix64: a permutation of the 64-bit integers whose output looks random for any input."""
    number = (number ^ _shift_right(number, 30)) * FIRST_MULTIPLIER
    number = (number ^ _shift_right(number, 27)) * SECOND_MULTIPLIER
    return number ^ _shift_right(number, 31)


def _shift_right(number: Tensor, bits: int) -> Tensor:
    """A logical shift, which fills with zeros. torch's own shift of a signed tensor fills with the sign."""
    return (number >> bits) & ((1 << 64 - bits) - 1)


def uniforms(key: Tensor, counter: Tensor, columns: Tensor) -> Tensor:
    """Floats in [0, 1), [rows, columns]. `columns` is 0, 1, 2, … on the same device as the other arguments."""
    # The n-th number of a stream is mix(key + n * gamma), with n = counter * num_columns + column + 1.
    number = mix(key[:, None] + (counter[:, None] * len(columns) + columns + 1) * GOLDEN_GAMMA)
    return _shift_right(number, 40).float() * 2.0**-24  # the upper 24 bits, as many as a float32 holds exactly
