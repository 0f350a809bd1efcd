"""A run on disk: config.json, metrics.jsonl, ledger.jsonl, timeline.jsonl, summary.json, policy.safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from freerun.core import Array, FloatArray, UserError

CONFIG, SUMMARY, POLICY = "config.json", "summary.json", "policy.safetensors"


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.ledger_path = path / "ledger.jsonl"
        self.timeline_path = path / "timeline.jsonl"
        self.trace_path = path / "timeline.json"

    @classmethod
    def choose(cls, path: Path | None, env: str, mode: str) -> RunFolder:
        """A folder without a run in it; under runs/ if no path is given. Nothing is written yet."""
        if path is None:
            slug = re.sub(r"[^\w.-]+", "-", env)
            path = _unused(Path("runs") / f"{slug}-{mode}-{datetime.now():%Y%m%d-%H%M%S}")
        if (path / CONFIG).exists():
            raise UserError(f"{path} already holds a run: name another --run-dir, or remove it")
        return cls(path)

    def make(self) -> Path:
        """The folder itself; it holds no run yet."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}; name another --run-dir") from None
        return self.path

    def create(self, config: Mapping[str, Any]) -> None:
        self.make()
        try:
            self._write_json(CONFIG, config)
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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._write_json(SUMMARY, summary)

    def write_policy(self, arrays: Mapping[str, FloatArray], description: Mapping[str, Any]) -> None:
        contiguous = {name: array.copy() for name, array in arrays.items()}
        write_atomically(self.path / POLICY, save(contiguous, {"freerun": json.dumps(description)}))

    def read_config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    def read_policy(self) -> tuple[dict[str, Array], dict[str, Any]]:
        try:
            with safe_open(self.path / POLICY, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                return arrays, json.loads(file.metadata()["freerun"])
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self.path / POLICY} is not a policy that freerun wrote: {error}") from None

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, such as the config.json of a run")
    return content


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def write_atomically(path: Path, content: bytes) -> None:
    """All or nothing: a reader, or a crash, never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
