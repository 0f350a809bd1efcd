"""Replay buffers on disk: rows that were kept once are never written again (nor touched, so a kill spoils nothing).

A ring is kept as chunks, each a file of its own that never changes: a checkpoint adds one with the rows that are new,
together with those of the last chunk while that is small, and names the chunks that make up the ring.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from freerun.core import Array, Ring, UserError
from freerun.persistence.files import sha256_of, sync_folder, write_durably
from freerun.persistence.state import to_numpy

FOLDER = "rows"
NAME = re.compile(r"[\w.-]+-\d+-\d+-[0-9a-f]{16}\.safetensors", re.ASCII)
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Chunk:
    name: str
    first: int
    stop: int
    sha256: str


class Rows:
    """The chunks of all rings of a run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rings: dict[str, list[Chunk]] = {}
        """As the newest checkpoint knows them."""
        self.pending: dict[str, list[Chunk]] = {}
        """As the one that is being written will."""

    def keep(self, path: str, ring: Ring) -> Any:
        """Write what is new; what JSON should say of the ring."""
        chunks = [chunk for chunk in self._rings.get(path, []) if ring.first < chunk.stop <= ring.total]
        rows_per_chunk = max(1, CHUNK_BYTES // _row_bytes(ring))
        first = chunks[-1].stop if chunks else ring.first
        if first < ring.total:
            if chunks and chunks[-1].stop - chunks[-1].first < rows_per_chunk // 2:
                first = max(chunks.pop().first, ring.first)
            starts = range(first, ring.total, rows_per_chunk)
            chunks += [self._write(path, ring, start, min(start + rows_per_chunk, ring.total)) for start in starts]
            sync_folder(self._folder)
        self.pending[path] = chunks
        return {
            "total": ring.total,
            "capacity": ring.capacity,
            "chunks": [[chunk.name, chunk.first, chunk.stop] for chunk in chunks],
        }

    def _write(self, path: str, ring: Ring, first: int, stop: int) -> Chunk:
        pieces = [columns for _, columns in ring.pieces(first, stop)]
        arrays = {name: np.concatenate([to_numpy(piece[name]) for piece in pieces]) for name in ring.columns}
        content = save(arrays)
        sha256 = hashlib.sha256(content).hexdigest()
        slug = re.sub(r"[^\w.]+", "-", path, flags=re.ASCII).strip("-")
        name = f"{slug}-{first}-{stop}-{sha256[:16]}.safetensors"
        self._folder.mkdir(exist_ok=True)
        if not (self._folder / name).exists() or sha256_of(self._folder / name) != sha256:
            write_durably(self._folder / name, content)
        return Chunk(name, first, stop, sha256)

    def committed(self) -> None:
        """The checkpoint that was being written is there."""
        self._rings, self.pending = self.pending, {}

    def files(self) -> dict[str, str]:
        """Names and hashes of what the checkpoint that is being written needs."""
        return {chunk.name: chunk.sha256 for chunks in self.pending.values() for chunk in chunks}

    def known(self) -> set[str]:
        """Names of what an earlier checkpoint needs too, and was looked at then."""
        return {chunk.name for chunks in self._rings.values() for chunk in chunks}

    def open(self, content: Any, hashes: dict[str, str]) -> KeptRing:
        try:
            chunks = [Chunk(name, int(first), int(stop), hashes[name]) for name, first, stop in content["chunks"]]
            ring = KeptRing(self._folder, chunks, int(content["total"]), int(content["capacity"]))
        except (KeyError, TypeError, ValueError):
            raise UserError("the checkpoint does not say which rows its replay buffer has") from None
        ends = [ring.first, *(chunk.stop for chunk in chunks)]
        in_order = all(chunk.first <= end < chunk.stop for chunk, end in zip(chunks, ends[:-1], strict=True))
        if not in_order or ends[-1] != ring.total or not all(NAME.fullmatch(chunk.name) for chunk in chunks):
            raise UserError("the checkpoint's replay buffer has gaps")
        return ring

    def resume(self, rings: dict[str, KeptRing]) -> None:
        self._rings = {path: list(ring.chunks) for path, ring in rings.items()}

    def forget_all_but(self, names: set[str]) -> None:
        """Remove chunks that no checkpoint needs."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if NAME.fullmatch(path.name) and path.name not in names:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class KeptRing:
    """A `Ring` on disk; pieces are read through a memory map, one at a time."""

    folder: Path
    chunks: list[Chunk]
    total: int
    capacity: int

    @property
    def first(self) -> int:
        return max(0, self.total - self.capacity)

    def pieces(self) -> Iterator[tuple[int, dict[str, Array]]]:
        first = self.first
        for chunk in self.chunks:
            with safe_open(self.folder / chunk.name, "numpy") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if any(len(column) != chunk.stop - chunk.first for column in columns.values()):
                raise UserError(f"{self.folder / chunk.name} does not hold the rows that its name says")
            yield first, {name: column[first - chunk.first :] for name, column in columns.items()}
            first = chunk.stop


def _row_bytes(ring: Ring) -> int:
    return sum(to_numpy(column[:1]).nbytes for column in ring.columns.values())
