"""Checkpoints: a folder each, whole or not there at all, verified by SHA-256, and nothing in it that is code.

RUN_DIR/checkpoints/update-000000120/ holds state.json, tensors.safetensors, policy.safetensors and MANIFEST, which
`sha256sum -c MANIFEST` understands; rows of replay buffers lie in RUN_DIR/checkpoints/rows, shared by all checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from freerun.core import UserError
from freerun.persistence import rings
from freerun.persistence.files import read_json, refuse_huge, sha256_of, sync_folder, write_durably
from freerun.persistence.rings import KeptRing, Rows
from freerun.persistence.state import Packer, unpack

logger = logging.getLogger("freerun")

FORMAT = 1
"""Raised when an older freerun could not read what this one writes."""
FOLDER, MANIFEST, STATE, TENSORS, POLICY = (
    "checkpoints",
    "MANIFEST",
    "state.json",
    "tensors.safetensors",
    "policy.safetensors",
)
NAME = re.compile(r"update-\d{9,18}", re.ASCII)
TEMPORARY = re.compile(r"\.(?:writing|replaced|removed)-.*", re.ASCII)
LINE = re.compile(rf"([0-9a-f]{{64}})  ({STATE}|{TENSORS}|{POLICY}|\.\./{rings.FOLDER}/{rings.NAME.pattern})", re.ASCII)
MOST_MANIFEST_BYTES = 16 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Damaged(Exception):
    """A checkpoint that must not be used, and why."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: dict[str, Any]
    rings: dict[str, KeptRing]


def folder_of(run_dir: Path) -> Path:
    return run_dir / FOLDER


def names(run_dir: Path) -> list[str]:
    """Of all checkpoints, oldest first, whether or not they can be used."""
    folder = folder_of(run_dir)
    found = [path.name for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda name: int(name.partition("-")[2]))


def verify(path: Path, known_rows: Collection[str] = ()) -> dict[str, str]:
    """The hashes of its files, after a look at every byte of them (but for rows that are known to be there)."""
    manifest = path / MANIFEST
    try:
        if not manifest.is_file() or manifest.stat().st_size > MOST_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST} is missing")
        text = manifest.read_bytes().decode("ascii")
        if not text.endswith("\n"):
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
            if name.rpartition("/")[2] in known_rows:
                continue
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            refuse_huge(path / name)
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
    hashes = verify(path)
    rows, found = Rows(path.parent / rings.FOLDER), dict[str, KeptRing]()
    by_name = {name.rpartition("/")[2]: sha256 for name, sha256 in hashes.items()}

    def open_ring(content: Any) -> KeptRing:
        ring = rows.open(content, by_name)
        found[str(content["path"])] = ring
        return ring

    try:
        packed = read_json(path / STATE)
        written = packed.get("format")
        if isinstance(written, int) and written > FORMAT:
            raise UserError(
                f"{path} was written by a newer freerun (format {written}, this one reads {FORMAT}): update"
            )
        state = unpack(packed, load_file(path / TENSORS), open_ring)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise Damaged(f"its content makes no sense: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Damaged("it does not say in which format it is")
    return Checkpoint(path, state, found)


def newest(run_dir: Path) -> Checkpoint:
    """The newest that can be used; those that cannot are named."""
    reasons = []
    for name in reversed(names(run_dir)):
        path = folder_of(run_dir) / name
        try:
            checkpoint = load(path)
        except Damaged as damage:
            reasons.append(f"{name}: {damage}")
            logger.warning("checkpoint %s is damaged and not used: %s", path, damage)
            continue
        if reasons:
            logger.warning("the run goes on from %s, the newest checkpoint that is whole", path)
        return checkpoint
    found = f"none of its checkpoints can be used ({'; '.join(reasons)})" if reasons else "it has no checkpoint"
    raise UserError(f"{run_dir} cannot be resumed: {found}")


def score_of(path: Path) -> float | None:
    """How good the policy was, as far as its file says."""
    with contextlib.suppress(UserError):
        score = read_json(path / STATE).get("score")
        return float(score) if isinstance(score, int | float) else None
    return None


def best(run_dir: Path) -> Path | None:
    """The checkpoint with the highest score; the newest of equals."""
    scores = {name: score_of(folder_of(run_dir) / name) for name in names(run_dir)}
    known = {name: score for name, score in scores.items() if score is not None}
    return folder_of(run_dir) / max(known, key=lambda name: (known[name], name)) if known else None


class Checkpoints:
    """Writes the checkpoints of one run, and keeps the last few and the best."""

    def __init__(self, run_dir: Path, num_kept: int, resumed: Checkpoint | None = None):
        self._run_dir = run_dir
        self._folder = folder_of(run_dir)
        self._num_kept = num_kept
        self._rows = Rows(self._folder / rings.FOLDER)
        known = names(run_dir)
        self._bad = set(known)  # of a run that never began, or newer than the one that could be used
        if resumed is not None:
            self._rows.resume(resumed.rings)
            self._bad = set(known[known.index(resumed.path.name) + 1 :])
        self._scores = {name: score_of(self._folder / name) for name in known if name not in self._bad}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # of a run that was killed as it wrote

    def write(self, update: int, state: Mapping[str, Any], policy: bytes) -> Path:
        """On the disk and verified when this returns. Where the disk is full, older ones make room."""
        name = f"update-{update:09}"
        try:
            path = self._write(name, state, policy)
        except OSError as error:
            if error.errno not in FULL or len(self._scores) < 2:
                raise
            self._prune(1, keep_best=False)
            path = self._write(name, state, policy)
        score = state.get("score")
        self._scores[name] = score if isinstance(score, float) else None
        self._bad.discard(name)
        for bad in self._bad:
            self._remove(bad)
        self._bad = set()
        self._prune(self._num_kept)
        return path

    def _write(self, name: str, state: Mapping[str, Any], policy: bytes) -> Path:
        target, temporary = self._folder / name, self._folder / f".writing-{name}"
        replaced = self._folder / f".replaced-{name}"
        try:
            self._folder.mkdir(exist_ok=True)
            temporary.mkdir()
            self._fill(temporary, state, policy)
            sync_folder(temporary)
            if target.exists():  # of a timeline that was given up, or damaged
                os.rename(target, replaced)
            os.rename(temporary, target)
            sync_folder(self._folder)
            try:
                verify(target, self._rows.known())
            except Damaged as damage:
                self._remove(name)
                raise OSError(errno.EIO, f"what was read back differs: {damage}") from None
            self._rows.committed()
        except OSError:
            self._drop_unused()
            raise
        finally:
            for path in (temporary, replaced):
                shutil.rmtree(path, ignore_errors=True)
        return target

    def _fill(self, folder: Path, state: Mapping[str, Any], policy: bytes) -> None:
        def keep_ring(path: str, ring: Any) -> Any:
            return {"path": path, **self._rows.keep(path, ring)}

        self._rows.pending = {}
        packer = Packer(keep_ring)
        packed = packer.pack({"format": FORMAT, **state}, "state")
        contents = {
            STATE: json.dumps(packed, indent=1, allow_nan=False).encode(),
            TENSORS: save(packer.arrays),
            POLICY: policy,
        }
        for name, content in contents.items():
            write_durably(folder / name, content)
        hashes = {name: sha256_of(folder / name) for name in contents}
        hashes |= {f"../{rings.FOLDER}/{name}": sha256 for name, sha256 in self._rows.files().items()}
        lines = [f"{sha256}  {name}\n" for name, sha256 in hashes.items()]
        write_durably(folder / MANIFEST, "".join(lines).encode())

    def _prune(self, num_kept: int, keep_best: bool = True) -> None:
        kept = set(list(self._scores)[-num_kept:])
        scored = {name: score for name, score in self._scores.items() if score is not None}
        if keep_best and scored:
            kept.add(max(scored, key=lambda name: (scored[name], name)))
        for name in [name for name in self._scores if name not in kept]:
            self._remove(name)
            del self._scores[name]
        self._drop_unused()

    def _remove(self, name: str) -> None:
        """First its name, then its files: a kill on the way leaves no half of it under that name."""
        removed = self._folder / f".removed-{name}"
        with contextlib.suppress(OSError):
            os.rename(self._folder / name, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _drop_unused(self) -> None:
        """Rows that no checkpoint needs."""
        needed = set()
        for name in names(self._run_dir):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                for line in (self._folder / name / MANIFEST).read_text(encoding="ascii").splitlines():
                    needed.add(line.rpartition("/")[2])
        with contextlib.suppress(OSError):
            self._rows.forget_all_but(needed)
