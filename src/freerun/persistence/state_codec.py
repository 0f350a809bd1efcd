"""Converts a nested state to JSON and named arrays, which safetensors stores, and back. There is no pickle."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from freerun.core import Array, RingBuffer, UserError

MARK = "$"
"""A JSON object with one key that begins with this stands for a value that JSON does not have."""


class Packer:
    """Takes a state apart into JSON, arrays and ring buffers."""

    def __init__(self, store_ring: Callable[[str, RingBuffer], Any]):
        self.arrays: dict[str, Array] = {}
        """The arrays and tensors so far, by their path in the state."""
        self._store_ring = store_ring

    def pack(self, value: Any, path: str) -> Any:
        """Return the value as JSON. Arrays and tensors are added to `arrays` under their path."""
        if isinstance(value, np.ndarray | np.generic):  # this comes first, because a np.float64 is also a float
            self.arrays[path] = to_numpy(value)
            return {"$array": path}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            # JSON has neither NaN nor infinity.
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, RingBuffer):
            return {"$ring": self._store_ring(path, value)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
                return {key: self.pack(part, f"{path}/{key}") for key, part in value.items()}
            # JSON turns all keys into texts, so a mapping with other keys (torch optimisers have ints) becomes pairs.
            return {"$items": [[key, self.pack(part, f"{path}/{key}")] for key, part in value.items()]}
        if isinstance(value, list | tuple | deque):
            return [self.pack(part, f"{path}/{place}") for place, part in enumerate(value)]
        if isinstance(value, set):
            return {"$set": sorted(value)}  # sorted, so that equal states are equal files
        if _is_tensor(value):
            self.arrays[path] = to_numpy(value)
            return {"$tensor": path}
        raise TypeError(f"{path} is a {type(value).__name__}, which no checkpoint can hold")


def _is_tensor(value: object) -> bool:
    """True for a torch tensor. Torch is not imported for that: if nobody has imported it, there is no tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> Array:
    """Return a contiguous array with the content of an array, or of a tensor on any device."""
    array = value.detach().cpu().numpy() if _is_tensor(value) else np.asarray(value)
    # ascontiguousarray turns a single number into an array of shape (1,), hence the reshape.
    return np.ascontiguousarray(array).reshape(array.shape)


def unpack(value: Any, arrays: Mapping[str, Array], open_ring: Callable[[Any], Any]) -> Any:
    """Undo `Packer.pack`."""
    if isinstance(value, list):
        return [unpack(part, arrays, open_ring) for part in value]
    if not isinstance(value, dict):
        return value
    (kind,) = value if len(value) == 1 else ("",)
    if not kind.startswith(MARK):
        return {key: unpack(part, arrays, open_ring) for key, part in value.items()}
    content = value[kind]
    if kind == "$float":
        return float(content)
    if kind == "$items":
        return {key: unpack(part, arrays, open_ring) for key, part in content}
    if kind == "$set":
        return set(content)
    if kind == "$ring":
        return open_ring(content)
    if kind == "$array":
        return arrays[content]
    if kind == "$tensor":
        import torch  # not at the top: evaluating an MLP needs no torch

        return torch.from_numpy(arrays[content].copy())  # the array may be read-only memory of the file
    raise UserError(f"the checkpoint holds a {kind!r}, which this version of freerun does not know")


def check_fit(loaded: Any, fresh: Any, path: str = "state") -> None:
    """Raise UserError unless a loaded state has all parts, shapes and types of a fresh one.

    Without this, torch would broadcast an array of another shape.
    """
    if isinstance(fresh, Mapping):
        if not isinstance(loaded, Mapping):
            raise UserError(f"the checkpoint does not fit this run: {path} is {_shape_text(loaded)}, not a mapping")
        if missing := [key for key in fresh if key not in loaded]:
            raise UserError(f"the checkpoint does not fit this run: {path} lacks {', '.join(map(str, missing))}")
        for key, part in fresh.items():
            check_fit(loaded[key], part, f"{path}/{key}")
    elif _has_shape(fresh) and (found := _shape_text(loaded)) != (wanted := _shape_text(fresh)):
        raise UserError(f"the checkpoint does not fit this run: {path} is {found}, not {wanted}")


def _shape_text(value: Any) -> str:
    """Return shape and type of an array or a tensor; the beginning of any other value."""
    return f"{tuple(value.shape)} of {value.dtype}" if _has_shape(value) else repr(value)[:80]


def _has_shape(value: object) -> bool:
    return isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def upgrade_algorithm_state(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an algorithm in the present form, whatever version has written it."""
    state = dict(algorithm)
    if "return_moments" in state and "reward_scale" not in state:
        # PPO once saved only the statistics of the discounted returns, and not the returns of unfinished episodes.
        state["reward_scale"] = {"moments": state.pop("return_moments"), "of_episodes": {}, "of_simulators": {}}
    return state
