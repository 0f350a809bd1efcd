"""`metrics.jsonl`: one line per update."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Protocol


class Lines(Protocol):
    def write(self, line: str) -> object: ...


class JsonLines:
    def __init__(self, file: Lines):
        self._file = file

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """The file is another's to close."""
