"""What metrics and the ledger need of a file: that it takes whole lines."""

from __future__ import annotations

from typing import Protocol


class LineWriter(Protocol):
    """Takes one line of text, with its line break."""

    def write(self, line: str) -> object: ...
