"""Loads a policy to act with, from wherever it lies: a run folder, a checkpoint, or a file that was exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freerun.run import numpy_export
from freerun.run.trained_policy import TrainedPolicy


def load_policy(
    path: str | Path, checkpoint: str | None = None, trust: Sequence[str] = (), seed: int | None = None
) -> TrainedPolicy:
    """Load the policy of a run, of one of its checkpoints (best, newest, or by name), or of a numpy export.

    A user's own network is code. If you did not train the run here, name the network again with `trust`. `seed` is for
    `predict(obs, deterministic=False)`.
    """
    place = Path(path)
    if place.is_file():
        return numpy_export.load(place, seed)
    from freerun.run.deployment import SavedPolicy  # here: a robot with an exported file does without what it imports

    return SavedPolicy.find(place, checkpoint).load(trust, seed)
