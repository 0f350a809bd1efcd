"""The folder of a run: config.json, checkpoints/, summary.json, policy.safetensors, and the files that grow."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from freerun.core import Array, EnvSpaces, FloatArray, UserError
from freerun.persistence.files import read_json, refuse_huge, write_atomically, write_json
from freerun.persistence.space_codec import pack_spaces, unpack_spaces

logger = logging.getLogger("freerun")

CONFIG, SUMMARY, POLICY, LOCK = "config.json", "summary.json", "policy.safetensors", ".lock"
METRICS = "metrics.jsonl"
DIFFER_BETWEEN_SEEDS = ("seed", "run_dir", "quiet", "watch", "display")
"""What may differ between runs of the same training with different seeds. Only the seed changes what is learned."""


class RunFolder:
    """The paths of a run's files, and the files that are written at its beginning and end."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics_path = path / METRICS
        self.ledger_path = path / "ledger.jsonl"
        self.timeline_path = path / "timeline.jsonl"
        self.trace_path = path / "timeline.json"
        self.log_path = path / "log.txt"

    @classmethod
    def choose(cls, path: Path | None, env: str, mode: str) -> RunFolder:
        """Choose a folder for a new run: this path, or a new one under runs/. Nothing is written yet."""
        if path is None:
            # Names of environments contain slashes and colons, which do not belong into a path.
            slug = re.sub(r"[^\w.-]+", "-", f"{env}-{mode}")
            path = _unused(Path("runs") / f"{slug}-{datetime.now():%Y%m%d-%H%M%S}")
        if (path / CONFIG).exists():
            raise UserError(f"{path} already holds a run: name another --run-dir, or remove it")
        return cls(path)

    def create(self) -> None:
        """Make the folder. It counts as a run only once it has a config.json (see `write_config`)."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / LOCK, b"")
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}; name another --run-dir") from None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that has ended. Raises UserError if it is none."""
        for name in (CONFIG, POLICY):
            if not (path / name).is_file():
                raise UserError(
                    f"{path} holds no finished run ({name} is missing): name a folder made by freerun train"
                )
        return cls(path)

    def claim(self) -> Callable[[], None]:
        """Lock the folder against other runs, until the returned function is called or this process ends."""
        _refuse_links_out(self.path)
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        # The kernel holds the lock with the open file, so it ends with the process, however that ends. A lock file that
        # must be removed would stay behind after a kill.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"the run in {self.path} is still going on: stop it before you resume it") from None
        except OSError:  # some network file systems have no locks
            logger.info("%s cannot be locked: make sure that nobody else resumes this run", self.path)
        return lambda: os.close(descriptor)

    def drop_results(self) -> None:
        """Remove the results of a run that is resumed. Until it ends again, its checkpoints hold the newest policy."""
        for name in (POLICY, SUMMARY):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def write_results(self, policy: bytes, summary: Mapping[str, Any]) -> bool:
        """Write the policy and the summary of a run that has ended; False, with a warning, if that fails."""
        try:
            write_atomically(self.path / POLICY, policy)
            write_json(self.path / SUMMARY, summary)
        except OSError as error:
            logger.warning("policy and summary could not be written to %s: %s", self.path, error.strerror)
            return False
        return True

    def has_results_of(self, update: int) -> bool:
        """True if the folder holds the results of a run that ended with this update."""
        try:
            summary = read_json(self.path / SUMMARY)
        except UserError:
            return False
        return (self.path / POLICY).exists() and summary.get("updates") == update

    def read_config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json. A run that is resumed can do without a new one; a new run cannot."""
        try:
            write_json(self.path / CONFIG, config)
        except OSError as error:
            if not (self.path / CONFIG).exists():
                raise UserError(f"cannot write to {self.path}: {error.strerror}; name another --run-dir") from None
            logger.warning("%s could not be replaced and stays as it was: %s", self.path / CONFIG, error.strerror)


class PolicyFile(NamedTuple):
    """The content of policy.safetensors."""

    arrays: dict[str, Array]
    description: dict[str, Any]
    """What is needed besides the arrays to build the policy again."""
    spaces: EnvSpaces | None
    """The environment's spaces; None in files of older versions, and if JSON cannot describe them."""


def pack_policy(arrays: Mapping[str, FloatArray], description: Mapping[str, Any], spaces: EnvSpaces) -> bytes:
    """Return the bytes of policy.safetensors."""
    # All metadata in one text: safetensors writes several entries in random order, and equal policies should be equal
    # files.
    about = {**description, "spaces": pack_spaces(spaces)}
    return save({name: array.copy() for name, array in arrays.items()}, {"freerun": json.dumps(about)})


def read_policy(path: Path) -> PolicyFile:
    """Read a policy from a file that may come from anywhere. Raises UserError if it cannot be used."""
    refuse_huge(path)
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            description = json.loads(file.metadata()["freerun"])
        described = description.pop("spaces", None)
        spaces = None if described is None else unpack_spaces(described)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not a policy that freerun wrote: {error}") from None
    # A policy with NaN in its weights would act at random without any error.
    if not isinstance(description, dict) or not all(np.isfinite(array).all() for array in arrays.values()):
        raise UserError(f"{path} is not a policy that can be used: its numbers are not finite")
    return PolicyFile(arrays, description, spaces)


def _unused(path: Path) -> Path:
    """Return the path, with a number appended if it exists."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def _refuse_links_out(folder: Path) -> None:
    """Refuse symbolic links that lead out of a run folder: a run that is resumed would write to their targets.

    In a folder from elsewhere, metrics.jsonl could lead to a file of the user's.
    """
    top = folder.resolve()
    # Links to folders are listed but not followed: one could lead in a circle, or through the whole disk.
    for parent, folders, files in os.walk(top, followlinks=False):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, where a run in {folder} would write: "
                    "remove it, or put what it leads to in its place"
                )


def without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that runs of the same training with different seeds have in common."""
    return {name: value for name, value in config.items() if name not in DIFFER_BETWEEN_SEEDS}
