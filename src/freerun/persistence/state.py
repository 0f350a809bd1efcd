"""A nested state as JSON and named arrays: what safetensors holds, and never a pickle."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from freerun.core import Array, Ring, UserError

MARK = "$"
"""Keys that begin with it say what kind of thing an object stands for."""


class Packer:
    """Takes a state apart."""

    def __init__(self, keep_ring: Callable[[str, Ring], Any]):
        self.arrays: dict[str, Array] = {}
        self._keep_ring = keep_ring

    def pack(self, value: Any, path: str) -> Any:
        """What JSON can hold; arrays and tensors are set aside under their path."""
        if isinstance(value, np.ndarray | np.generic):  # first, for a np.float64 is a float too
            self.arrays[path] = to_numpy(value)
            return {"$array": path}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Ring):
            return {"$ring": self._keep_ring(path, value)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
                return {key: self.pack(part, f"{path}/{key}") for key, part in value.items()}
            return {"$items": [[key, self.pack(part, f"{path}/{key}")] for key, part in value.items()]}
        if isinstance(value, list | tuple | deque):
            return [self.pack(part, f"{path}/{place}") for place, part in enumerate(value)]
        if isinstance(value, set):
            return {"$set": sorted(value)}
        if hasattr(value, "detach"):
            self.arrays[path] = to_numpy(value)
            return {"$tensor": path}
        raise TypeError(f"{path} is a {type(value).__name__}, which no checkpoint can hold")


def to_numpy(value: Any) -> Array:
    """Of a tensor, wherever it is, or an array; contiguous."""
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    return np.ascontiguousarray(array).reshape(array.shape)


def unpack(value: Any, arrays: Mapping[str, Array], open_ring: Callable[[Any], Any]) -> Any:
    """The reverse of `Packer.pack`."""
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
        import torch  # here and not above: an evaluation of an MLP does without it

        return torch.from_numpy(arrays[content].copy())
    raise UserError(f"the checkpoint holds a {kind!r}, which this version of freerun does not know")


def check_fit(loaded: Any, fresh: Any, path: str = "state") -> None:
    """Refuse a state that the algorithm did not write: torch would stretch an array of another shape to fit."""
    if isinstance(fresh, Mapping):
        if not isinstance(loaded, Mapping) or not fresh.keys() <= loaded.keys():
            raise UserError(f"the checkpoint does not fit this run: {path} lacks something")
        for key, part in fresh.items():
            check_fit(loaded[key], part, f"{path}/{key}")
    elif hasattr(fresh, "shape"):
        same = hasattr(loaded, "shape") and (loaded.shape, loaded.dtype) == (fresh.shape, fresh.dtype)
        if not same:
            found = f"{tuple(loaded.shape)} of {loaded.dtype}" if hasattr(loaded, "shape") else repr(loaded)[:80]
            raise UserError(
                f"the checkpoint does not fit this run: {path} is {found}, not {tuple(fresh.shape)} of {fresh.dtype}"
            )
