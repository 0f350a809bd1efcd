"""Checkpoints: each is a folder that is whole or not there at all, verified by SHA-256, and free of code.

RUN_DIR/checkpoints/update-000000120/ holds state.json, tensors.safetensors, policy.safetensors and MANIFEST, which
`sha256sum -c MANIFEST` understands. Rows of replay buffers lie in RUN_DIR/checkpoints/rows, shared by all checkpoints.
There is no pickle, so that loading a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from freerun.core import UserError
from freerun.persistence import ring_files
from freerun.persistence.files import read_json, refuse_huge, sha256_of, sync_folder, write_durably
from freerun.persistence.ring_files import RingStore, StoredRing
from freerun.persistence.run_folder import POLICY
from freerun.persistence.state_codec import Packer, unpack

logger = logging.getLogger("freerun")

FORMAT = 1
"""The version of the format. It is raised when an older freerun could not read what this one writes."""
FOLDER, MANIFEST, STATE, TENSORS = "checkpoints", "MANIFEST", "state.json", "tensors.safetensors"
# Nine digits, so that names sort by age; a very long run may need more. Eighteen fit into 64 bits.
NAME = re.compile(r"update-\d{9,18}", re.ASCII)
TEMPORARY = re.compile(r"\.(?:writing|replaced|removed)-.*", re.ASCII)
# The only names that a manifest may contain. A crafted one could otherwise point to any file of the user's.
LINE = re.compile(
    rf"([0-9a-f]{{64}})  ({STATE}|{TENSORS}|{POLICY}|\.\./{ring_files.FOLDER}/{ring_files.NAME.pattern})", re.ASCII
)
MOST_MANIFEST_BYTES = 16 << 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Damaged(Exception):
    """Raised for a checkpoint that must not be used. The message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    state: dict[str, Any]
    rings: dict[str, StoredRing]
    """Replay buffers, by their path in the state. Their rows stay on disk until they are needed."""


def folder_of(run_dir: Path) -> Path:
    return run_dir / FOLDER


def name_of(update: int) -> str:
    return f"update-{update:09}"


def names(run_dir: Path) -> list[str]:
    """Return the names of all checkpoints of a run, oldest first, whether or not they can be used."""
    folder = folder_of(run_dir)
    found = [path.name for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    # By number and not by text: beyond nine digits a longer name would sort before a shorter one.
    return sorted(found, key=lambda name: int(name.partition("-")[2]))


def verify(path: Path, verified_rows: Collection[str] = ()) -> dict[str, str]:
    """Verify all files of a checkpoint, except rows that were verified before, and return their hashes.

    Raises `Damaged` if anything is missing or differs.
    """
    manifest = path / MANIFEST
    try:
        if not manifest.is_file() or manifest.stat().st_size > MOST_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST} is missing")
        text = manifest.read_bytes().decode("ascii")
        if not text.endswith("\n"):  # every line that freerun writes has an end
            raise Damaged(f"{MANIFEST} is cut off")
        hashes: dict[str, str] = {}
        for line in text[:-1].split("\n"):
            match = LINE.fullmatch(line)
            if match is None:
                raise Damaged(f"{MANIFEST} is not one that freerun wrote")
            hashes[match[2]] = match[1]
        for name in (STATE, TENSORS, POLICY):
            if name not in hashes:
                raise Damaged(f"{MANIFEST} does not name {name}")
        for name, sha256 in hashes.items():
            if name.rpartition("/")[2] in verified_rows:
                continue
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            refuse_huge(path / name)  # before the file is read
            if sha256_of(path / name) != sha256:
                raise Damaged(f"{name} is not what was written (its SHA-256 differs)")
    except UserError as error:
        raise Damaged(str(error)) from None
    except UnicodeDecodeError:
        raise Damaged(f"{MANIFEST} is not one that freerun wrote") from None
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from None
    return hashes


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises `Damaged` if it must not be used."""
    hashes = verify(path)
    ring_store, found = RingStore(path.parent / ring_files.FOLDER), dict[str, StoredRing]()
    by_name = {name.rpartition("/")[2]: sha256 for name, sha256 in hashes.items()}

    def open_ring(content: Any) -> StoredRing:
        ring = ring_store.open(content, by_name)
        found[str(content["path"])] = ring
        return ring

    state = _unpacked(path, lambda packed: unpack(packed, load_file(path / TENSORS), open_ring))
    return Checkpoint(path, state, found)


def load_settings(path: Path) -> Checkpoint:
    """Read only the settings of the run from a checkpoint. This needs neither torch nor much memory."""
    verify(path)
    names = ("format", "config")
    state = _unpacked(path, lambda packed: unpack({name: packed.get(name) for name in names}, {}, lambda content: None))
    return Checkpoint(path, state, {})


def _unpacked(path: Path, unpack_state: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Read state.json and unpack it. Whatever a damaged or crafted file makes fail becomes `Damaged`."""
    try:
        packed = read_json(path / STATE)
        written = packed.get("format")
        # Not `Damaged`: the search must not fall back to an older checkpoint of a run that a newer freerun continued.
        if isinstance(written, int) and written > FORMAT:
            raise UserError(
                f"{path} was written by a newer freerun (format {written}, this one reads {FORMAT}): update freerun"
            )
        state = unpack_state(packed)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise Damaged(f"its content is invalid: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Damaged("it does not name its format")
    return state


def newest(run_dir: Path, read: Callable[[Path], Checkpoint] = load) -> Checkpoint:
    """Return the newest checkpoint of a run that can be used. Damaged ones are logged and passed over."""
    reasons = []
    for name in reversed(names(run_dir)):
        path = folder_of(run_dir) / name
        try:
            checkpoint = read(path)
        except Damaged as damage:
            reasons.append(f"{name}: {damage}")
            logger.warning("checkpoint %s is damaged and not used: %s", path, damage)
            continue
        if reasons:
            logger.warning("%s is used, the newest checkpoint that is whole", path)
        return checkpoint
    found = f"none of its checkpoints can be used ({'; '.join(reasons)})" if reasons else "it has no checkpoint"
    raise UserError(f"there is nothing to continue from in {run_dir}: {found}")


def score_of(path: Path) -> float | None:
    """Return the score of the checkpoint's policy; None if the file does not say."""
    with contextlib.suppress(UserError):
        score = read_json(path / STATE).get("score")
        return float(score) if isinstance(score, int | float) else None
    return None


def best(run_dir: Path) -> Path | None:
    """Return the checkpoint with the highest score, the newest among equals; None if no checkpoint has a score."""
    scores = {name: score_of(folder_of(run_dir) / name) for name in names(run_dir)}
    known = {name: score for name, score in scores.items() if score is not None}
    return folder_of(run_dir) / max(known, key=lambda name: (known[name], name)) if known else None


class Checkpoints:
    """Writes the checkpoints of one run, and keeps the last few and the best one."""

    def __init__(self, run_dir: Path, num_kept: int, resumed: Checkpoint | None = None):
        self._run_dir = run_dir
        self._folder = folder_of(run_dir)
        self._num_kept = num_kept
        self._ring_store = RingStore(self._folder / ring_files.FOLDER)
        known = names(run_dir)
        # Checkpoints that are removed once a new one is written: all that a run which never began has left, or those
        # newer than the one that was resumed from, for these are damaged.
        self._obsolete = set(known)
        if resumed is not None:
            self._ring_store.resume(resumed.rings)
            self._obsolete = set(known[known.index(resumed.path.name) + 1 :])
        self._scores = {name: score_of(self._folder / name) for name in known if name not in self._obsolete}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # a run was killed while it wrote this

    def policy_of(self, update: int) -> bytes | None:
        """Return the content of policy.safetensors in the checkpoint of that update; None if there is none."""
        with contextlib.suppress(OSError):
            return (self._folder / name_of(update) / POLICY).read_bytes()
        return None

    def write(self, update: int, state: Mapping[str, Any], policy: bytes) -> Path:
        """Write a checkpoint, which is on the disk and verified when this returns. A full disk costs older ones."""
        name = name_of(update)
        try:
            path = self._write(name, state, policy)
        except OSError as error:
            if error.errno not in DISK_FULL or len(self._scores) < 2:
                raise
            # One more attempt with only the newest checkpoint left. A run should be able to resume, even if its best
            # checkpoint is lost by that.
            self._prune(1, keep_best=False)
            path = self._write(name, state, policy)
        score = state.get("score")
        self._scores[name] = score if isinstance(score, float) else None
        self._obsolete.discard(name)
        for obsolete in self._obsolete:
            self._remove(obsolete)
        self._obsolete = set()
        self._prune(self._num_kept)
        return path

    def _write(self, name: str, state: Mapping[str, Any], policy: bytes) -> Path:
        target, temporary = self._folder / name, self._folder / f".writing-{name}"
        replaced = self._folder / f".replaced-{name}"
        # The order makes a crash at any point harmless:
        #   1. every file is written and fsynced inside a temporary folder, so its bytes are on the disk;
        #   2. the temporary folder is fsynced, so the names of the files are on the disk too;
        #   3. one rename gives the folder its name: before it there is no new checkpoint, after it a whole one;
        #   4. the parent folder is fsynced, so that the rename itself survives a power failure;
        #   5. the result is read back and verified, and only then are older checkpoints removed.
        try:
            self._folder.mkdir(exist_ok=True)
            temporary.mkdir()
            self._fill(temporary, state, policy)
            sync_folder(temporary)
            if target.exists():  # a damaged one, or one of updates that were given up: rename cannot replace a folder
                os.rename(target, replaced)
            os.rename(temporary, target)
            sync_folder(self._folder)
            try:
                verify(target, self._ring_store.verified_files())
            except Damaged as damage:
                self._remove(name)
                raise OSError(errno.EIO, f"what was read back differs: {damage}") from None
            self._ring_store.commit()
        except OSError:
            self._remove_unused_rows()
            raise
        finally:
            for path in (temporary, replaced):
                shutil.rmtree(path, ignore_errors=True)
        return target

    def _fill(self, folder: Path, state: Mapping[str, Any], policy: bytes) -> None:
        """Write all files of a checkpoint into an empty folder."""

        def store_ring(path: str, ring: Any) -> Any:
            return {"path": path, **self._ring_store.store(path, ring)}

        self._ring_store.pending = {}
        packer = Packer(store_ring)
        packed = packer.pack({"format": FORMAT, **state}, "state")
        contents = {
            STATE: json.dumps(packed, indent=1, allow_nan=False).encode(),
            TENSORS: save(packer.arrays),
            POLICY: policy,
        }
        for name, content in contents.items():
            write_durably(folder / name, content)
        # The manifest comes last: a folder without one is not a checkpoint.
        hashes = {name: sha256_of(folder / name) for name in contents}
        hashes |= {f"../{ring_files.FOLDER}/{name}": sha256 for name, sha256 in self._ring_store.files().items()}
        lines = [f"{sha256}  {name}\n" for name, sha256 in hashes.items()]
        write_durably(folder / MANIFEST, "".join(lines).encode())

    def _prune(self, num_kept: int, keep_best: bool = True) -> None:
        """Remove all checkpoints but the last few and, if wanted, the best one."""
        # A dict keeps the order of insertion, so the last ones are the newest.
        kept = set(list(self._scores)[-num_kept:])
        scored = {name: score for name, score in self._scores.items() if score is not None}
        if keep_best and scored:
            kept.add(max(scored, key=lambda name: (scored[name], name)))
        for name in [name for name in self._scores if name not in kept]:
            self._remove(name)
            del self._scores[name]
        self._remove_unused_rows()

    def _remove(self, name: str) -> None:
        """Remove a checkpoint: first its name, then its files. So a kill in between leaves no half of it."""
        removed = self._folder / f".removed-{name}"
        with contextlib.suppress(OSError):
            os.rename(self._folder / name, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _remove_unused_rows(self) -> None:
        """Remove files of rows that no checkpoint names in its manifest."""
        needed = set()
        for name in names(self._run_dir):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                for line in (self._folder / name / MANIFEST).read_text(encoding="ascii").splitlines():
                    needed.add(line.rpartition("/")[2])
        with contextlib.suppress(OSError):
            self._ring_store.remove_all_but(needed)
