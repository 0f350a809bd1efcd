"""Records the timeline of a run: a thread beside the run reads all state tracks twice a second and writes a line."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freerun.core import Counts, Metrics
from freerun.telemetry.machine_load import MachineLoad
from freerun.telemetry.timeline import STATE_NAMES, pack_block, read_timeline_header, read_timeline_record
from freerun.transport.state_tracks import SharedTracks, TrackBlock, TracksReader

logger = logging.getLogger("freerun")

EVERY_SECONDS = 0.5
FINE_SECONDS = 120.0
"""During the first two minutes every block is written as it is. Later, short blocks are merged."""
BLOCKS_PER_SECOND = 100
"""About this many blocks are written per second after that, over all tracks: it bounds the size of the file."""


class TimelineRecorder:
    """Writes timeline.jsonl until it is closed. A run that is resumed continues the file that it finds."""

    def __init__(self, path: Path, tracks: SharedTracks, counts: Callable[[], Counts], machine: MachineLoad):
        self._reader = TracksReader(tracks)
        self._counts = counts
        self._machine = machine
        seconds_before = _recorded_seconds(path, tracks.names)
        self._began_at = time.perf_counter() - (seconds_before or 0.0)
        self._file = path.open("w" if seconds_before is None else "a", encoding="utf-8")
        if seconds_before is None:
            self._write({"tracks": tracks.names, "states": STATE_NAMES, "began": time.time()})
        self._mergers = [BlockMerger() for _ in tracks.names]
        self._resolution_seconds = len(tracks.names) / BLOCKS_PER_SECOND
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="freerun-timeline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.wait(EVERY_SECONDS):
                self.record()
        except Exception as failure:  # a thread has nobody to raise it to: `close` does
            self._failure = failure

    def record(self, is_last: bool = False) -> None:
        """Write one line with everything that has happened since the line before."""
        blocks = self._reader.read(to_the_end=is_last)
        at = time.perf_counter() - self._began_at
        resolution_seconds = 0.0 if at <= FINE_SECONDS else self._resolution_seconds
        merged: list[TrackBlock] = []
        for block in blocks:
            since_start = block._replace(start=block.start - self._began_at)
            merged += self._mergers[block.track].add(since_start, resolution_seconds)
        if is_last:
            merged += [block for merger in self._mergers for block in merger.rest()]
        # The last line follows at once on the one before: too short an interval to measure the machine's load.
        figures: Metrics = self._machine.measure() if not is_last else {}
        counts = self._counts()
        figures = {**figures, "worker_restarts": counts.worker_restarts}
        if counts.queue_fill is not None:
            figures["queue_percent"] = 100 * counts.queue_fill
        self._write({"at": round(at, 3), **figures, "blocks": [pack_block(block) for block in merged]})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()  # `freerun watch` reads the file while it grows

    def close(self) -> None:
        # The thread must have ended before the last line: neither the reader nor the file has a lock.
        self._closing.set()
        self._thread.join()
        try:
            if self._failure is None:
                self.record(is_last=True)
            self._file.close()
        except OSError as failure:
            self._failure = failure
        if isinstance(self._failure, OSError):  # a full disk, for example, is no reason to lose a run
            logger.warning("%s is not complete: %s", self._file.name, self._failure.strerror)
        elif self._failure is not None:
            raise self._failure


def _recorded_seconds(path: Path, tracks: list[str]) -> float | None:
    """Return how far a timeline reaches that this run can continue; None if there is none with the same tracks.

    A run that was killed may have left half a line at the end, which is cut off.
    """
    if not path.is_file():
        return None
    with path.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    try:
        if not lines or read_timeline_header(lines[0]).tracks != tracks:
            return None
        return read_timeline_record(lines[-1], len(tracks)).at if len(lines) > 1 else 0.0
    except ValueError:  # freerun did not write this file
        return None


class BlockMerger:
    """Merges consecutive blocks of one track until each is at least as long as a resolution."""

    def __init__(self) -> None:
        self._pending: TrackBlock | None = None

    def add(self, block: TrackBlock, resolution_seconds: float) -> Iterator[TrackBlock]:
        """Yield the blocks that are complete now. A block that is too short waits for the next one."""
        pending, self._pending = self._pending, None
        if pending is not None and (
            sum(pending.seconds) >= resolution_seconds
            # A gap between two blocks is time that was not recorded: merging over it would misplace seconds.
            or block.start - pending.stop > max(0.1, resolution_seconds)
        ):
            yield pending
        elif pending is not None:
            seconds = tuple(a + b for a, b in zip(pending.seconds, block.seconds, strict=True))
            block = TrackBlock(block.track, pending.start, seconds)
        if sum(block.seconds) >= resolution_seconds:
            yield block
        else:
            self._pending = block

    def rest(self) -> list[TrackBlock]:
        """Return the block that still waits, if there is one."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending]
