"""Numbers of README.md and docs/ that look measured and are not: phrases of each page, and why they may stand there."""

from __future__ import annotations

NOT_MEASURED: dict[str, dict[str, tuple[str, ...]]] = {}
