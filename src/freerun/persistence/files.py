"""Files that survive a kill and a full disk: they are whole or not there. Reading is bounded: files may be hostile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

from freerun.core import UserError

logger = logging.getLogger("freerun")

MOST_JSON_BYTES = 64 << 20
"""No JSON file and no line of a run is larger. A larger one from elsewhere would only take all memory."""
HASHED_AT_ONCE = 1 << 20
"""Bytes per read, so that a file of gigabytes is never in memory as a whole."""


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is on the disk, and not only in the kernel's cache, when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that neither a reader nor a crash ever sees half of it."""
    # The process id keeps two processes that write the same file from sharing a temporary one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # First the bytes, then the name: if the rename reached the disk before them, a power failure would leave an empty
    # file. The temporary file is in the same folder, because a rename is atomic only within one file system.
    try:
        write_durably(temporary, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people may read too, atomically."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def sync_folder(path: Path) -> None:
    """Write a folder's list of names to the disk. A rename survives a power failure only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def refuse_huge(path: Path) -> None:
    """Refuse a file larger than half of the memory. A file with holes can be that large and take no space on a disk."""
    size, memory = path.stat().st_size if path.is_file() else 0, psutil.virtual_memory().total
    if size > memory / 2:
        raise UserError(f"{path} has {size >> 30} GiB, more than half of this machine's memory: it is not read")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError with one sentence if the file holds anything else, or is too large."""
    try:
        if not path.is_file():
            raise UserError(f"cannot read {path}: there is no such file")
        if path.stat().st_size > MOST_JSON_BYTES:
            raise UserError(f"{path} is larger than {MOST_JSON_BYTES >> 20} MiB: freerun wrote no such file")
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply: freerun wrote no such file") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, such as the config.json of a run")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is not JSON, or holds NaN or infinity, which Python would accept."""
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


class LineFile:
    """A growing file of whole lines. Lines that a full disk does not take wait here, and no line is ever torn."""

    def __init__(self, path: Path, resume_from: dict[str, Any] | None = None):
        """Begin an empty file, or continue after the `mark` that a checkpoint holds. Later lines are cut off."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._digest = hashlib.sha256()
        self._size = 0
        self._unwritten = b""
        self._is_failing = False
        if resume_from is not None:
            self._resume(resume_from)
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def _resume(self, mark: dict[str, Any]) -> None:
        content = os.pread(self._descriptor, min(mark["bytes"], os.fstat(self._descriptor).st_size), 0)
        content = content[: content.rfind(b"\n") + 1]  # without half a line at the end
        self._digest.update(content)
        self._size = len(content)
        if (self._size, self._digest.hexdigest()) != (mark["bytes"], mark["sha256"]):
            logger.warning(
                "%s differs from what the checkpoint recorded: it continues after its last whole line", self.path
            )

    def write(self, line: str) -> None:
        """Add one line, with its line break."""
        self._unwritten += line.encode()
        with contextlib.suppress(OSError):  # `flush` has logged it, and the next line tries again
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait. A disk that is full now may have space again later."""
        try:
            written = 0
            while written < len(self._unwritten):  # write() may take only a part, before a disk is full
                written += os.write(self._descriptor, self._unwritten[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                # Cut off half a line, so that a reader never sees it and the next attempt begins at its start.
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            if not self._is_failing:
                logger.warning(
                    "%s cannot be written: %s; training goes on, and the lines wait", self.path, error.strerror
                )
            self._is_failing = True
            raise
        # Only now, after the whole of it was written: the hash must describe what is in the file.
        self._digest.update(self._unwritten)
        self._size += len(self._unwritten)
        self._unwritten = b""
        self._is_failing = False

    def mark(self) -> dict[str, Any]:
        """Return the position to resume the file from, for a checkpoint. Raises OSError if not all is on the disk."""
        self.flush()
        os.fsync(self._descriptor)  # a checkpoint must not refer to lines that a power failure could still take
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        if self._unwritten:
            logger.warning("%s lacks its last %d bytes: the disk did not take them", self.path, len(self._unwritten))
        os.close(self._descriptor)
