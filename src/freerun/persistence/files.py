"""Files that survive a kill, a full disk and a careless download: whole or not there at all, bounded when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import psutil

from freerun.core import UserError

logger = logging.getLogger("freerun")

MOST_JSON_BYTES = 64 << 20
HASHED_AT_ONCE = 1 << 20


def write_durably(path: Path, content: bytes) -> None:
    """A new file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """All or nothing: a reader, or a crash, never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_durably(temporary, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A rename is on the disk once the folder is."""
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
    """A file with holes takes no room on a disk, and all of a machine's memory when it is read."""
    size, memory = path.stat().st_size if path.is_file() else 0, psutil.virtual_memory().total
    if size > memory / 2:
        raise UserError(f"{path} has {size >> 30} GiB, more than half of this machine's memory: it is not read")


def read_json(path: Path) -> dict[str, Any]:
    """An object; whatever else a file may hold is refused with one sentence, and so is one that is too large."""
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
    """What it says; ValueError where it is not JSON, or a number in it is beyond all numbers."""
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


class Lines:
    """A file of whole lines that grows. What a full disk does not take waits here, and no line is ever torn."""

    def __init__(self, path: Path, keep: dict[str, Any] | None = None):
        """Begin anew, or go on after what a checkpoint says of it."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._digest = hashlib.sha256()
        self._size = 0
        self._waiting = b""
        self._is_failing = False
        if keep is not None:
            self._go_on(keep)
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def _go_on(self, keep: dict[str, Any]) -> None:
        content = os.pread(self._descriptor, min(keep["bytes"], os.fstat(self._descriptor).st_size), 0)
        content = content[: content.rfind(b"\n") + 1]
        self._digest.update(content)
        self._size = len(content)
        if (self._size, self._digest.hexdigest()) != (keep["bytes"], keep["sha256"]):
            logger.warning("%s is not as the checkpoint knows it: it goes on after its last whole line", self.path)

    def write(self, line: str) -> None:
        self._waiting += line.encode()
        with contextlib.suppress(OSError):  # said already; the next line tries again
            self.flush()

    def flush(self) -> None:
        """Write what waits; a disk that is full may hold later what it does not hold now."""
        try:
            written = 0
            while written < len(self._waiting):
                written += os.write(self._descriptor, self._waiting[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)  # half a line
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            if not self._is_failing:
                logger.warning("%s cannot be written: %s; training goes on, lines wait", self.path, error.strerror)
            self._is_failing = True
            raise
        self._digest.update(self._waiting)
        self._size += len(self._waiting)
        self._waiting = b""
        self._is_failing = False

    def mark(self) -> dict[str, Any]:
        """What a checkpoint must know to go on from here; raises if not everything is on the disk."""
        self.flush()
        os.fsync(self._descriptor)
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        if self._waiting:
            logger.warning("%s lacks its last %d bytes: the disk did not take them", self.path, len(self._waiting))
        os.close(self._descriptor)
