"""`log.txt`: the messages and warnings of a run, with the time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("freerun")


class _ForgivingFileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: it must not end a run, and the message is on the terminal too."""


class _RedactingFormatter(logging.Formatter):
    def __init__(self, redact: Callable[[str], str]):
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class LogFile:
    """Copies everything that freerun logs into a file, until it is closed."""

    def __init__(self, path: Path, redact: Callable[[str], str]):
        """`redact` takes secrets out of a text before it is written."""
        self._file = _ForgivingFileHandler(path, encoding="utf-8")
        self._file.setFormatter(_RedactingFormatter(redact))
        # Python prints warnings by itself only while the logger has no handler, so its own handler is added too.
        terminal = logging.lastResort if not logger.hasHandlers() else None
        self._handlers = [self._file, *([terminal] if terminal is not None else [])]
        # The file takes messages from INFO on. The terminal's handler keeps its own threshold, which is WARNING.
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
