"""Whose code a run folder names. `module:callable` in a file is imported only if this user wrote it, or names it again.

A folder that somebody has downloaded could say `"env": "os:system"`. So a run signs the names of the code that it was
started with, by a key that never leaves this user's machine; a folder without that signature came from elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from freerun.core import UserError
from freerun.persistence.files import write_atomically

logger = logging.getLogger("freerun")

FILE_NAME = ".origin"
KEY_BYTES = 32


def code_in(options: Mapping[str, Any]) -> list[str]:
    """What these settings would have imported, fetched, trusted or told: callables, modules, folders, clusters, and
    where a run's figures would go."""
    found = [options.get(name) for name in ("env", "network", "termination", "algo", "mode")]
    env_args = options.get("env_args")
    if isinstance(env_args, Mapping):
        found += [*env_args.values()]
    names: list[Any] = [value for value in found if isinstance(value, str) and ":" in value]
    if isinstance(env_args, Mapping):
        names.append(env_args.get("tasks"))  # Isaac Lab: a module that registers more of them
    names += [options.get(name) for name in ("cyborg_path", "ray_runtime_env")]
    if options.get("ray_address") not in ("local", "auto"):
        names.append(options.get("ray_address"))
    track = options.get("track") or ()
    if "wandb" in track:
        names.append(options.get("wandb_entity"))
    if "prometheus" in track and options.get("prometheus_host") not in ("127.0.0.1", "localhost", "::1"):
        names.append(options.get("prometheus_host"))
    return sorted({str(name) for name in names if name is not None})


def sign(folder: Path, options: Mapping[str, Any]) -> None:
    """This user has started the run in this folder, with this code."""
    if code := code_in(options):
        with contextlib.suppress(OSError):  # it will have to be named again
            write_atomically(folder / FILE_NAME, _signature(_key(), code).encode())


def check(options: Mapping[str, Any], folder: Path, named: Collection[str] = ()) -> None:
    """Refuse code that neither this user has started a run with in this folder, nor names now."""
    code = code_in(options)
    missing = [name for name in code if name not in named]
    if not missing:
        return
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if hmac.compare_digest((folder / FILE_NAME).read_text("ascii"), _signature(_key(), code)):
            return
    raise UserError(
        f"{folder} was not trained here, and names code to run: {', '.join(missing)}. If you know it and trust it, "
        f"name it again: {' '.join(f'--trust {name}' for name in missing)}"
    )


def _signature(key: bytes, code: list[str]) -> str:
    return hmac.new(key, json.dumps(code).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's; made when it is first needed, and readable by nobody else."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "freerun" / "key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".key.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # of two at once, the first wins
            os.link(draft, path)
        draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is damaged: remove it")
    return key
