"""What sites share as Flower's records, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from freerun.core import FloatArray, UserError
from freerun.tools.federation.federation_options import SendAs
from freerun.tools.federation.shared_state import SharedState, unpack_moments

ARRAYS, CONFIG, METRICS, SITE = "arrays", "config", "metrics", "site"
"""The records of a message: weights; the server's wishes; figures of a site; its name and its moments."""
MOMENTS, UPDATES, NAME = "moments", "updates", "name"
STEPS, RETURN = "num-steps", "mean-return"
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, AssertionError, EOFError, OSError)
"""What numpy and Flower raise for a record that is not what it should be."""


def to_arrays(
    weights: dict[str, FloatArray], send_as: SendAs = "exact", order: Iterable[str] | None = None
) -> ArrayRecord:
    """Pack weights as they are sent. Flower's mods want the names in the order in which the server has sent them."""
    arrays = {name: weights[name] for name in order or weights}
    if send_as == "float16":
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which the other side refuses
            arrays = {name: array.astype(np.float16) for name, array in arrays.items()}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def to_weights(arrays: Any) -> dict[str, FloatArray]:
    try:
        found = {name: np.asarray(array.numpy()) for name, array in arrays.items()}
    except UNREADABLE as error:
        raise UserError(f"its weights cannot be read: {error}") from None
    # Numbers of 16 bits are only for the way: nobody adds them up.
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in found.items()}


def read_shared(content: RecordDict, moments_in: str) -> SharedState:
    """Read weights and moments from a message; the moments are in the record of this name."""
    try:
        arrays, packed = content[ARRAYS], content[moments_in][MOMENTS]
    except UNREADABLE as error:
        raise UserError(f"its message lacks {error}") from None
    if not isinstance(packed, bytes):
        raise UserError("its moments cannot be read")
    return SharedState(to_weights(arrays), unpack_moments(packed))


def num_bytes(content: RecordDict) -> int:
    """The bytes of weights and moments in a message."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    packed = [record.get(MOMENTS, b"") for record in content.config_records.values()]
    return arrays + sum(len(value) for value in packed if isinstance(value, bytes))
