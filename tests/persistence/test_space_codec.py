"""Spaces come back from JSON unchanged, and invalid descriptions are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from freerun.core import EnvSpaces
from freerun.persistence.space_codec import pack_spaces, unpack_spaces

ACTION = spaces.Discrete(2)
SPACES: dict[str, spaces.Space[Any]] = {
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "half bounded": spaces.Box(np.array([0.1, -np.inf], np.float32), np.array([np.inf, 2.0], np.float32)),
    "picture": spaces.Box(0, 255, (2, 4, 3), np.uint8),
    "float64": spaces.Box(-0.1, 1 / 3, (2, 2), np.float64),
    "large integers": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64),
    "no numbers": spaces.Box(0.0, 1.0, (0,), np.float32),
    "from five on": spaces.Discrete(3, start=5),
    "small integers": spaces.Discrete(3, dtype=np.int8),
    "several choices": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "bits": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict(
        {"z": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), "a": spaces.Box(0, 1, (2,))}
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_comes_back_the_same(name: str) -> None:
    text = json.dumps(pack_spaces(EnvSpaces(SPACES[name], ACTION)), allow_nan=False)
    restored = unpack_spaces(json.loads(text))
    assert restored.observation.dtype == SPACES[name].dtype
    assert restored == (SPACES[name], ACTION)


def test_the_parts_of_a_dict_keep_their_order() -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    restored = unpack_spaces(pack_spaces(EnvSpaces(space, ACTION))).observation
    assert isinstance(restored, spaces.Dict)
    assert list(restored) == list(space) == ["z", "a"]


def test_a_space_without_a_description_is_left_out() -> None:
    assert pack_spaces(EnvSpaces(spaces.Sequence(spaces.Discrete(3)), ACTION)) is None


BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": 0, "high": 1}


@pytest.mark.parametrize(
    "about",
    [
        None,
        "Box",
        {},
        {"kind": "Sequence"},
        {**BOX, "shape": [1 << 40]},
        {**BOX, "shape": [-1]},
        {**BOX, "low": [0, 0, 0]},
        {**BOX, "low": "low"},
        {**BOX, "dtype": "object"},
        {"kind": "Discrete", "n": -1, "start": 0, "dtype": "int64"},
        {"kind": "Dict", "spaces": [1]},
    ],
)
def test_what_nobody_packed_is_refused(about: Any) -> None:
    with pytest.raises(ValueError, match="its spaces are invalid"):
        unpack_spaces([about, BOX])
    with pytest.raises(ValueError, match="its spaces are invalid"):
        unpack_spaces([BOX])
