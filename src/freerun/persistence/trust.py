"""Decides whether code that a run folder names may be imported: only if this user wrote the folder, or names it again.

A folder that somebody has downloaded could say `"env": "os:system"`. So a run signs the names of the code with which it
was started. The key never leaves this user's machine, so a folder without the signature came from elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

from freerun.core import UserError
from freerun.persistence.files import write_atomically

logger = logging.getLogger("freerun")

FILE_NAME = ".origin"
KEY_BYTES = 32


def sign(folder: Path, code: Sequence[str]) -> None:
    """Note in the folder that this user has started the run with this code."""
    if code:
        with contextlib.suppress(OSError):  # without a signature, the user has to name the code again
            write_atomically(folder / FILE_NAME, _signature(_key(), code).encode())


def check(code: Sequence[str], folder: Path, named: Collection[str] = ()) -> None:
    """Raise UserError for code that this user neither names now nor has started the run in this folder with."""
    missing = [name for name in code if name not in named]
    if not missing:
        return
    with contextlib.suppress(OSError, UnicodeDecodeError):
        # compare_digest takes the same time whatever differs, so that a signature cannot be guessed piece by piece.
        if hmac.compare_digest((folder / FILE_NAME).read_text("ascii"), _signature(_key(), code)):
            return
    raise UserError(
        f"{folder} was not trained here, and names code to run: {', '.join(missing)}. If you know it and trust it, "
        f"name it again: {' '.join(f'--trust {name}' for name in missing)}"
    )


def _signature(key: bytes, code: Sequence[str]) -> str:
    return hmac.new(key, json.dumps(list(code)).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Return the key of this user. It is made when it is first needed, and nobody else can read it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "freerun" / "key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write a draft and link it to its name: a link fails if the name exists. So of two processes at once the first
        # wins, and nobody ever reads half a key.
        draft = path.with_name(f".key.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is damaged: remove it")
    return key
