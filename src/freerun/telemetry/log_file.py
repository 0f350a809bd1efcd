"""`log.txt`: what a run has said in words, warnings among it, with the time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("freerun")


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not end a run: what was said is on the terminal too."""


class _Covered(logging.Formatter):
    def __init__(self, cover: Callable[[str], str]):
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._cover = cover

    def format(self, record: logging.LogRecord) -> str:
        return self._cover(super().format(record))


class LogFile:
    def __init__(self, path: Path, cover: Callable[[str], str]):
        """`cover` takes out of a text what no file may hold."""
        self._file = _File(path, encoding="utf-8")
        self._file.setFormatter(_Covered(cover))
        # Python prints warnings by itself only while nobody handles them.
        by_default = logging.lastResort if not logger.hasHandlers() else None
        self._handlers = [self._file, *([by_default] if by_default is not None else [])]
        self._level = logger.level
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        for handler in self._handlers:
            logger.addHandler(handler)

    def close(self) -> None:
        for handler in self._handlers:
            logger.removeHandler(handler)
        logger.setLevel(self._level)
        self._file.close()
