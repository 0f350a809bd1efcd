"""`metrics.jsonl`: one line per update."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from freerun.telemetry.line_writer import LineWriter


class MetricsFile:
    """A sink that writes each record as a line of JSON."""

    def __init__(self, file: LineWriter):
        self._file = file

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinity, so such a value becomes null.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """The caller closes the file, which checkpoints use too."""
