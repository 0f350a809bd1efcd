"""A policy in one .npz file, which numpy and Gymnasium's spaces are enough to run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from freerun.adapters.space_adapter import SpaceAdapter
from freerun.algorithms.policies.numpy_actors import NumpyActor, restore_numpy
from freerun.core import Array, EnvSpaces, UserError
from freerun.persistence.space_codec import pack_spaces, unpack_spaces
from freerun.run.trained_policy import TrainedPolicy

ABOUT = "freerun"
"""The entry of the file that describes the others: JSON, as bytes. All others are the policy's arrays."""
SUFFIX = ".npz"
MOST_BYTES = 1 << 30
"""No policy has more. A file from elsewhere that unpacks to more would only take all memory."""


def save(policy: TrainedPolicy, path: Path) -> None:
    """Write the arrays of a policy, its description and its spaces. Raises UserError if numpy cannot run it."""
    if not isinstance(policy.actor, NumpyActor):
        raise UserError(
            "numpy cannot run a network of your own or impala: export it with --to onnx or --to torchscript"
        )
    spaces = pack_spaces(EnvSpaces(policy.observation_space, policy.action_space))
    about = json.dumps({**policy.actor.describe(), "spaces": spaces})
    arrays: dict[str, Any] = {ABOUT: np.frombuffer(about.encode(), np.uint8), **policy.actor.arrays}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def load(path: Path, seed: int | None = None) -> TrainedPolicy:
    """Load what `save` has written, from a file that may come from anywhere. Raises UserError if it is another file."""
    if path.suffix != SUFFIX:
        raise UserError(
            f"{path} is no policy that numpy can run: name a run folder or an {SUFFIX} file of freerun export --to "
            "numpy; ONNX files are for onnxruntime, TorchScript files for torch.jit.load"
        )
    try:
        arrays = _read_arrays(path)
        description = json.loads(arrays.pop(ABOUT).tobytes())
        env_spaces = unpack_spaces(description.pop("spaces"))
        actor = restore_numpy(arrays, description)
        fits = actor.fits(SpaceAdapter(*env_spaces).spec)
    except (zipfile.BadZipFile, LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not a policy that freerun exported: {error}") from None
    # A policy with NaN in its weights would act at random without any error.
    if not fits or not np.isfinite(actor.weights).all():
        raise UserError(f"{path} cannot be used: its network does not fit its spaces, or its numbers are not finite")
    return TrainedPolicy(actor, env_spaces, _no_settings, seed)


def _read_arrays(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _no_settings(_: Sequence[str]) -> NoReturn:
    raise UserError("an exported policy does not know the settings of its run: name the run folder instead")
