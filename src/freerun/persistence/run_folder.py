"""A run on disk: config.json, checkpoints/, summary.json, policy.safetensors, and what is noted on the way."""

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
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from freerun.core import Array, FloatArray, UserError
from freerun.persistence.files import read_json, refuse_huge, write_atomically
from freerun.persistence.links import refuse_links_out

logger = logging.getLogger("freerun")

CONFIG, SUMMARY, POLICY, LOCK = "config.json", "summary.json", "policy.safetensors", ".lock"


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.ledger_path = path / "ledger.jsonl"
        self.timeline_path = path / "timeline.jsonl"
        self.trace_path = path / "timeline.json"
        self.log_path = path / "log.txt"

    @classmethod
    def choose(cls, path: Path | None, env: str, mode: str) -> RunFolder:
        """A folder without a run in it; under runs/ if no path is given. Nothing is written yet."""
        if path is None:
            slug = re.sub(r"[^\w.-]+", "-", f"{env}-{mode}")
            path = _unused(Path("runs") / f"{slug}-{datetime.now():%Y%m%d-%H%M%S}")
        if (path / CONFIG).exists():
            raise UserError(f"{path} already holds a run: name another --run-dir, or remove it")
        return cls(path)

    def create(self) -> None:
        """It holds a run once it has a config.json: see `write_config`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / LOCK, b"")
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}; name another --run-dir") from None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        for name in (CONFIG, POLICY):
            if not (path / name).is_file():
                raise UserError(
                    f"{path} holds no finished run ({name} is missing): name a folder made by freerun train"
                )
        return cls(path)

    def claim(self) -> Callable[[], None]:
        """Nobody else may write here until the function that is returned is called, or this process ends."""
        refuse_links_out(self.path)
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"the run in {self.path} is still going on: stop it before you resume it") from None
        except OSError:  # a file system that has no locks
            logger.info("%s cannot be locked: see to it that nobody else resumes this run", self.path)
        return lambda: os.close(descriptor)

    def drop_results(self) -> None:
        """A run that goes on has not ended: until it does, its checkpoints hold the newest policy."""
        for name in (POLICY, SUMMARY):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def write_results(self, policy: bytes, summary: Mapping[str, Any]) -> bool:
        """What a run ends with; False, and a word, where the disk does not take it."""
        try:
            write_atomically(self.path / POLICY, policy)
            self._write_json(SUMMARY, summary)
        except OSError as error:
            logger.warning("policy and summary could not be written to %s: %s", self.path, error.strerror)
            return False
        return True

    def read_config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    def write_config(self, config: Mapping[str, Any]) -> None:
        try:
            self._write_json(CONFIG, config)
        except OSError as error:
            if not (self.path / CONFIG).exists():
                raise UserError(f"cannot write to {self.path}: {error.strerror}; name another --run-dir") from None
            logger.warning("%s stays as it was: %s", self.path / CONFIG, error.strerror)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode())


def pack_policy(arrays: Mapping[str, FloatArray], description: Mapping[str, Any]) -> bytes:
    """The content of policy.safetensors."""
    return save({name: array.copy() for name, array in arrays.items()}, {"freerun": json.dumps(description)})


def read_policy(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Its arrays, and what it takes to build it again."""
    refuse_huge(path)
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            description = json.loads(file.metadata()["freerun"])
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not a policy that freerun wrote: {error}") from None
    if not isinstance(description, dict) or not all(np.isfinite(array).all() for array in arrays.values()):
        raise UserError(f"{path} is not a policy that can be used: its numbers are not finite")
    return arrays, description


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
