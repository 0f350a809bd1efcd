"""`log.txt`: what a run has said in words, warnings among it, with the time."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger("freerun")


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not end a run: what was said is on the terminal too."""


class LogFile:
    def __init__(self, path: Path):
        self._file = _File(path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
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
