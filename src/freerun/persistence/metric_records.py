"""Reads the lines of metrics.jsonl. A folder may come from anywhere, so nothing in it is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from freerun.core import UserError

MOST_LINE_BYTES = 4 << 20
"""A line of a run has a few kilobytes. A longer one from elsewhere would only take memory."""
MOST_NAMES = 2000
"""The most metrics in one line. A run has about a hundred, and one share for each lag."""


def read_record(line: str | bytes) -> dict[str, float | None]:
    """Return the metrics of one line; None for a value that was not finite. Raises ValueError for anything else."""
    if len(line) > MOST_LINE_BYTES:
        raise ValueError("the line is too long")
    try:
        content = json.loads(line)
        if not isinstance(content, dict) or len(content) > MOST_NAMES:
            raise ValueError("the line is not a record")
        return {name: _number(value) for name, value in content.items()}
    except (RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _number(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:20]!r} is not a number")
    return value if math.isfinite(value) else None  # an int may be too large for a float


def read_records(path: Path) -> Iterator[dict[str, float | None]]:
    """Yield the records of all whole lines."""
    if not path.is_file():
        raise UserError(f"{path} is missing: name the folder of a run that freerun has trained")
    with path.open("rb") as file:
        number = 0
        # A run may still write the last line, so a line without an end is left out. A line beyond the limit is cut by
        # `readline` and has no end either, but must be refused.
        while (line := file.readline(MOST_LINE_BYTES + 1)).endswith(b"\n") or len(line) > MOST_LINE_BYTES:
            number += 1
            try:
                yield read_record(line)
            except ValueError:
                raise UserError(f"line {number} of {path} is not one that freerun wrote") from None
