"""`metrics.jsonl`: one line per update."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


class JsonLines:
    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        self._file.close()
