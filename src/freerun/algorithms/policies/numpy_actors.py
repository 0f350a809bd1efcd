"""The policies that numpy can run, and how one is made again from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freerun.algorithms.policies.cnn_actor import CNNActor
from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.mlp_actor import MLPActor
from freerun.core import Array

NumpyActor = MLPActor | MemoryActor | CNNActor
KINDS: dict[str, type[NumpyActor]] = {"memory": MemoryActor, "cnn": CNNActor}
"""By the `kind` that a policy's description names. All others are left to the MLP, which refuses what it is not."""


def restore_numpy(arrays: Mapping[str, Array], description: Mapping[str, Any]) -> NumpyActor:
    """A policy that numpy can run, from what `arrays` and `describe` of another one have returned."""
    return KINDS.get(str(description.get("kind")), MLPActor).restore(arrays, description)
