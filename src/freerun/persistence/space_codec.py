"""Converts the spaces of an environment to JSON, so that a policy can be used without its environment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from freerun.core import Array, EnvSpaces

MOST_NUMBERS = 1 << 24
"""No observation has more numbers. A file from elsewhere that claims more would only take all memory."""


def pack_spaces(found: EnvSpaces) -> list[Any] | None:
    """Describe both spaces for JSON; None if one of them is of a kind that is not supported."""
    try:
        return [_describe(space) for space in found]
    except TypeError:
        return None


def unpack_spaces(described: Any) -> EnvSpaces:
    """Undo `pack_spaces`. Raises ValueError for a description that it did not write."""
    try:
        observation, action = (_restore(part) for part in described)
    except (  # whatever a damaged or crafted description makes numpy and Gymnasium raise
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ValueError(f"its spaces are invalid: {type(error).__name__}: {error}") from None
    return EnvSpaces(observation, action)


def _describe(space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        limits = {"low": describe_limits(space.low), "high": describe_limits(space.high)}
        return {"kind": "Box", "shape": list(space.shape), "dtype": space.dtype.name, **limits}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}
    if isinstance(space, spaces.MultiDiscrete):
        choices = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"kind": "MultiDiscrete", "dtype": space.dtype.name, **choices}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Dict) and all(isinstance(name, str) for name in space):
        return {"kind": "Dict", "spaces": [[name, _describe(part)] for name, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": [_describe(part) for part in space]}
    raise TypeError(f"{space} has no description")


def _restore(about: Any) -> spaces.Space[Any]:
    kind = about["kind"]
    if kind == "Box":
        shape = _shape(about["shape"])
        dtype: Any = np.dtype(about["dtype"])
        return spaces.Box(_array(about["low"], shape, dtype), _array(about["high"], shape, dtype), shape, dtype)
    if kind == "Discrete":
        return spaces.Discrete(int(about["n"]), start=int(about["start"]), dtype=np.dtype(about["dtype"]).type)
    if kind == "MultiDiscrete":
        whole: Any = np.dtype(about["dtype"]).type
        return spaces.MultiDiscrete(np.array(about["nvec"], whole), whole, start=np.array(about["start"], whole))
    if kind == "MultiBinary":
        n = about["n"]
        return spaces.MultiBinary(_shape(n) if isinstance(n, list) else _shape([n])[0])
    if kind == "Dict":
        # Pairs, and not a JSON object, because their order is that of the numbers in a flattened observation.
        return spaces.Dict([(str(name), _restore(part)) for name, part in about["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([_restore(part) for part in about["spaces"]])
    raise ValueError(f"there is no space {kind!r}")


def describe_limits(limits: Array) -> object:
    """Return the limits as a list, or as one number if all are equal, as those of images are."""
    return _finite(limits.flat[0].item() if limits.size and (limits == limits.flat[0]).all() else limits.tolist())


def _finite(value: object) -> object:
    """Replace infinite numbers, which JSON does not have, by texts that `float` reads."""
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _array(value: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    # One number may stand for all of them. A broadcast view is not contiguous, so this makes an array of its own.
    numbers = np.array(_infinite(value), dtype)
    return np.ascontiguousarray(np.broadcast_to(numbers, shape))


def _infinite(value: object) -> object:
    """Undo `_finite`."""
    if isinstance(value, list):
        return [_infinite(part) for part in value]
    return float(value) if isinstance(value, str) else value


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(size) for size in sizes)
    # math.prod has no overflow; numpy's product of crafted sizes could wrap around to a small number.
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_NUMBERS:
        raise ValueError(f"shape {shape} is negative or too large")
    return shape
