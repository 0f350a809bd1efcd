"""Numbers with a unit in README.md and docs/ that are no measurements of ours, by page: phrases, and why they are none."""

from __future__ import annotations

NOT_MEASURED: dict[str, dict[str, tuple[str, ...]]] = {}
