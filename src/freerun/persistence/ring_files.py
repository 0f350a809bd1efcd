"""Replay buffers on disk. Rows are written once and never again, so checkpoints of large buffers stay cheap.

A ring buffer is stored as chunks, each a file of its own that never changes, so that a kill spoils nothing. A
checkpoint adds a chunk with the rows that are new and names all chunks that make up the buffer. While the last chunk is
small, the new one includes its rows and takes its place: so frequent checkpoints do not leave many small files.
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

from freerun.core import Array, RingBuffer, UserError
from freerun.persistence.files import sha256_of, sync_folder, write_durably
from freerun.persistence.state_codec import to_numpy

FOLDER = "rows"
NAME = re.compile(r"[\w.-]+-\d+-\d+-[0-9a-f]{16}\.safetensors", re.ASCII)
CHUNK_BYTES = 8 << 20
"""The size of a full chunk. A checkpoint writes at most half a chunk of old rows again."""


@dataclass(frozen=True)
class Chunk:
    """A file with the rows from `first` to `stop` of one ring."""

    name: str
    first: int
    stop: int
    sha256: str


class RingStore:
    """The chunks of all ring buffers of a run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rings: dict[str, list[Chunk]] = {}
        """The chunks of each ring in the newest checkpoint."""
        self.pending: dict[str, list[Chunk]] = {}
        """The chunks of each ring in the checkpoint that is being written."""

    def store(self, path: str, ring: RingBuffer) -> Any:
        """Write the rows that are new. Returns the description of the ring for state.json."""
        # Chunks whose rows have all been overwritten are left out. A ring that was rolled back has fewer rows than some
        # chunks: these belong to updates that were given up.
        chunks = [chunk for chunk in self._rings.get(path, []) if ring.first < chunk.stop <= ring.total]
        rows_per_chunk = max(1, CHUNK_BYTES // _row_bytes(ring))
        first = chunks[-1].stop if chunks else ring.first
        if first < ring.total:
            # A last chunk under half of the full size is written again, together with the new rows.
            if chunks and chunks[-1].stop - chunks[-1].first < rows_per_chunk // 2:
                first = max(chunks.pop().first, ring.first)
            starts = range(first, ring.total, rows_per_chunk)
            chunks += [self._write(path, ring, start, min(start + rows_per_chunk, ring.total)) for start in starts]
            sync_folder(self._folder)  # so that the names of new chunks survive a power failure
        self.pending[path] = chunks
        return {
            "total": ring.total,
            "capacity": ring.capacity,
            "chunks": [[chunk.name, chunk.first, chunk.stop] for chunk in chunks],
        }

    def _write(self, path: str, ring: RingBuffer, first: int, stop: int) -> Chunk:
        pieces = [columns for _, columns in ring.pieces(first, stop)]
        arrays = {name: np.concatenate([to_numpy(piece[name]) for piece in pieces]) for name in ring.columns}
        content = save(arrays)
        sha256 = hashlib.sha256(content).hexdigest()
        slug = re.sub(r"[^\w.]+", "-", path, flags=re.ASCII).strip("-")
        name = f"{slug}-{first}-{stop}-{sha256[:16]}.safetensors"
        self._folder.mkdir(exist_ok=True)
        # The name contains the hash, so a file that an attempt before has left need not be written again.
        if not (self._folder / name).exists() or sha256_of(self._folder / name) != sha256:
            write_durably(self._folder / name, content)
        return Chunk(name, first, stop, sha256)

    def commit(self) -> None:
        """Note that the checkpoint which was being written is complete."""
        self._rings, self.pending = self.pending, {}

    def files(self) -> dict[str, str]:
        """Return names and hashes of the files that the checkpoint which is being written needs."""
        return {chunk.name: chunk.sha256 for chunks in self.pending.values() for chunk in chunks}

    def verified_files(self) -> set[str]:
        """Return names of files that an earlier checkpoint needed too, and that were verified then."""
        return {chunk.name for chunks in self._rings.values() for chunk in chunks}

    def open(self, content: Any, hashes: dict[str, str]) -> StoredRing:
        """Open the ring that state.json describes. Raises UserError if its chunks do not cover all of its rows."""
        try:
            chunks = [Chunk(name, int(first), int(stop), hashes[name]) for name, first, stop in content["chunks"]]
            ring = StoredRing(self._folder, chunks, int(content["total"]), int(content["capacity"]))
        except (KeyError, TypeError, ValueError):
            raise UserError("the checkpoint does not say which rows its replay buffer has") from None
        # Each chunk must begin at or before the end of the one before it, and end after it.
        ends = [ring.first, *(chunk.stop for chunk in chunks)]
        in_order = all(chunk.first <= end < chunk.stop for chunk, end in zip(chunks, ends[:-1], strict=True))
        if not in_order or ends[-1] != ring.total or not all(NAME.fullmatch(chunk.name) for chunk in chunks):
            raise UserError("the checkpoint's replay buffer has gaps")
        return ring

    def resume(self, rings: dict[str, StoredRing]) -> None:
        """Build on the chunks of the checkpoint that the run resumes from."""
        self._rings = {path: list(ring.chunks) for path, ring in rings.items()}

    def remove_all_but(self, names: set[str]) -> None:
        """Remove all other chunks: no checkpoint needs them."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if NAME.fullmatch(path.name) and path.name not in names:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class StoredRing:
    """A `RingBuffer` on disk. Its chunks are read through a memory map, one at a time."""

    folder: Path
    chunks: list[Chunk]
    total: int
    capacity: int

    @property
    def first(self) -> int:
        """The number of the oldest row."""
        return max(0, self.total - self.capacity)

    def pieces(self) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield all rows, oldest first: the number of each piece's first row, and its columns."""
        first = self.first
        for chunk in self.chunks:
            with safe_open(self.folder / chunk.name, "numpy") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if any(len(column) != chunk.stop - chunk.first for column in columns.values()):
                raise UserError(f"{self.folder / chunk.name} does not hold the rows that its name says")
            yield first, {name: column[first - chunk.first :] for name, column in columns.items()}
            first = chunk.stop


def _row_bytes(ring: RingBuffer) -> int:
    return sum(to_numpy(column[:1]).nbytes for column in ring.columns.values())
