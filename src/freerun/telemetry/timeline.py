"""`timeline.jsonl`: what every worker, the learner and its stages did, second by second, and how busy the machine was.

The first line names the tracks and states; each further line holds the blocks of half a second. A block is
`[track, start, state, seconds, state, seconds, …]`: seconds since the beginning, and spent in each state.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from freerun.core import Array, Counts, Metrics, State, UserError
from freerun.telemetry.machine import Machine
from freerun.transport.tracks import NUM_STATES, Block, Tracks, TracksReader

logger = logging.getLogger("freerun")

FILE_NAME = "timeline.jsonl"
EVERY_SECONDS = 0.5
FINE_SECONDS = 120.0
"""So long every block is written as it is; later they are merged, to at most so many a second:"""
BLOCKS_PER_SECOND = 100
TRACK, START, SECONDS = 0, 1, 2
MOST_TRACKS, MOST_SECONDS, MOST_LINE_BYTES = 20_000, 1e10, 64 << 20
"""More than that no run has written."""
STATE_NAMES = tuple(state.name.lower().replace("_", "-") for state in State)


class Timeline:
    """A thread that looks twice a second, beside the run."""

    def __init__(self, path: Path, tracks: Tracks, counts: Callable[[], Counts], machine: Machine):
        self._reader = TracksReader(tracks)
        self._counts = counts
        self._machine = machine
        seconds_before = _recorded_seconds(path, tracks.names)
        self._began = time.perf_counter() - (seconds_before or 0.0)
        self._file = path.open("w" if seconds_before is None else "a", encoding="utf-8")
        if seconds_before is None:
            self._write({"tracks": tracks.names, "states": STATE_NAMES, "began": time.time()})
        self._mergers = [Merger() for _ in tracks.names]
        self._resolution = len(tracks.names) / BLOCKS_PER_SECOND
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._look_on, name="freerun-timeline", daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        try:
            while not self._closing.wait(EVERY_SECONDS):
                self._look(self._reader.read())
        except Exception as failure:  # raised by `close`
            self._failure = failure

    def _look(self, blocks: list[Block], is_last: bool = False) -> None:
        at = time.perf_counter() - self._began
        resolution = 0.0 if at <= FINE_SECONDS else self._resolution
        merged: list[Block] = []
        for block in blocks:
            merged += self._mergers[block.track].add(block._replace(start=block.start - self._began), resolution)
        if is_last:
            merged += [block for merger in self._mergers for block in merger.rest()]
        figures: Metrics = self._machine.look() if not is_last else {}
        counts = self._counts()
        figures = {**figures, "worker_restarts": counts.worker_restarts}
        if counts.queue_fill is not None:
            figures["queue_percent"] = 100 * counts.queue_fill
        self._write({"at": round(at, 3), **figures, "blocks": [_packed(block) for block in merged]})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        try:
            if self._failure is None:
                self._look(self._reader.read(to_the_end=True), is_last=True)
            self._file.close()
        except OSError as failure:
            self._failure = failure
        if isinstance(self._failure, OSError):  # a full disk, say: no reason to lose a run
            logger.warning("%s is not complete: %s", self._file.name, self._failure.strerror)
        elif self._failure is not None:
            raise self._failure


def _recorded_seconds(path: Path, tracks: list[str]) -> float | None:
    """Of a run that goes on where it had stopped, whose last line may be torn; None where there is nothing to go on."""
    if not path.is_file():
        return None
    with path.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    try:
        if not lines or read_head(lines[0]).tracks != tracks:
            return None
        return read_moment(lines[-1], len(tracks)).at if len(lines) > 1 else 0.0
    except ValueError:  # no run wrote that
        return None


class Merger:
    """Blocks of one track that follow each other, made longer: none shorter than the resolution is left alone."""

    def __init__(self) -> None:
        self._held: Block | None = None

    def add(self, block: Block, resolution: float) -> Iterator[Block]:
        held, self._held = self._held, None
        if held is not None and (sum(held.seconds) >= resolution or block.start - held.stop > max(0.1, resolution)):
            yield held
        elif held is not None:
            seconds = tuple(a + b for a, b in zip(held.seconds, block.seconds, strict=True))
            block = Block(block.track, held.start, seconds)
        if sum(block.seconds) >= resolution:
            yield block
        else:
            self._held = block

    def rest(self) -> list[Block]:
        held, self._held = self._held, None
        return [] if held is None else [held]


def _packed(block: Block) -> list[float]:
    spent = [(state, round(seconds, 5)) for state, seconds in enumerate(block.seconds) if seconds >= 5e-6]
    return [block.track, round(block.start, 5), *(part for pair in spent for part in pair)]


# ---------------------------------------------------------------------------------------------- reading


class Moment(NamedTuple):
    """What one line says: figures of a moment, and the blocks that had ended by then."""

    at: float
    figures: Metrics
    blocks: Array
    """[N, 2 + states]: track, start, and the seconds in each state."""


class Head(NamedTuple):
    """What the first line says."""

    tracks: list[str]
    began: float
    """Seconds since 1970."""


def read_head(line: str | bytes) -> Head:
    """ValueError where it is none: a folder may come from anywhere."""
    try:
        content = json.loads(line)
        tracks, began = content["tracks"], float(content["began"])
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(tracks, list) or len(tracks) > MOST_TRACKS or not all(isinstance(name, str) for name in tracks):
        raise ValueError("these are no tracks")
    return Head(tracks, began)


def read_moment(line: str | bytes, num_tracks: int) -> Moment:
    """ValueError where it is none."""
    try:
        content = json.loads(line)
        at, packed = float(content.pop("at")), content.pop("blocks")
        blocks = np.zeros((len(packed), START + 1 + NUM_STATES), np.float64)
        for row, (track, start, *spent) in enumerate(packed):
            blocks[row, TRACK], blocks[row, START] = track, start
            for place in range(0, len(spent), 2):
                blocks[row, SECONDS + range(NUM_STATES)[spent[place]]] = spent[place + 1]
        figures = {name: float(value) for name, value in content.items() if isinstance(value, int | float)}
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    tracks, sizes = blocks[:, TRACK], np.abs(np.append(blocks, at))
    if not (sizes < MOST_SECONDS).all() or not ((tracks >= 0) & (tracks < num_tracks)).all():
        raise ValueError("numbers that no run wrote")
    return Moment(at, figures, blocks)


class Recording:
    """A timeline on disk. It may be hours long, so it is read as it is needed and never held as a whole."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            try:
                self.tracks, self.began = read_head(file.readline(MOST_LINE_BYTES))
            except ValueError:
                raise UserError(f"{path} does not begin as freerun writes it") from None

    @classmethod
    def of(cls, run_dir: Path) -> Recording | None:
        """None where nothing was recorded."""
        path = run_dir / FILE_NAME
        return cls(path) if path.is_file() and path.stat().st_size else None

    def moments(self) -> Iterator[Moment]:
        with self.path.open("rb") as file:
            file.readline(MOST_LINE_BYTES)
            while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):  # the last one may be under way
                try:
                    yield read_moment(line, len(self.tracks))
                except ValueError:
                    raise UserError(f"{self.path} has a line that freerun did not write") from None

    def grid(self, cell_seconds: float = 0.0625) -> Grid:
        grid = Grid(len(self.tracks), cell_seconds=cell_seconds)
        for moment in self.moments():
            grid.add(moment)
        return grid


class Grid:
    """Seconds in each state, by track and by cells of time that double when there are too many: never any larger."""

    def __init__(self, num_tracks: int, num_cells: int = 2048, cell_seconds: float = 0.0625):
        self.seconds = 0.0
        """How far it reaches."""
        self._width = cell_seconds
        self._spent = np.zeros((num_tracks, num_cells, NUM_STATES), np.float32)

    def add(self, moment: Moment) -> None:
        num_tracks, num_cells, _ = self._spent.shape
        self.seconds = max(self.seconds, moment.at)
        while self.seconds >= self._width * num_cells:
            pairs = self._spent.reshape(num_tracks, num_cells // 2, 2, NUM_STATES).sum(axis=2)
            self._spent[:, : num_cells // 2], self._spent[:, num_cells // 2 :] = pairs, 0.0
            self._width *= 2
        if len(moment.blocks):
            first = int(moment.blocks[:, START].min() / self._width)
            last = int(_stops(moment.blocks).max() / self._width)
            here = slice(max(0, first), min(num_cells, last + 1))
            self._spent[:, here] += spread(
                moment.blocks, num_tracks, here.start * self._width, self._width, here.stop - here.start
            )

    def cells(self, start: float, stop: float, num_cells: int) -> Array:
        """[track, cell, state] of so many equal parts of the time between two moments."""
        edges = np.linspace(start, stop, num_cells + 1) / self._width
        sums = np.zeros((self._spent.shape[0], self._spent.shape[1] + 1, NUM_STATES))
        np.cumsum(self._spent, axis=1, out=sums[:, 1:])
        whole = np.clip(edges.astype(int), 0, self._spent.shape[1] - 1)
        reached = self.seconds / self._width  # the cell of this moment is filled up to here
        filled = np.where(whole == int(reached), max(reached - int(reached), 1e-9), 1.0)
        part = np.clip((edges - whole) / filled, 0.0, 1.0)[:, None]
        until = sums[:, whole] + part * self._spent[:, whole]
        parts: Array = np.diff(until, axis=1).astype(np.float32)
        return parts


def spread(blocks: Array, num_tracks: int, start: float, width: float, num_cells: int) -> Array:
    """Seconds in each state, [track, cell, state], of cells of a width from `start` on."""
    spent = np.zeros((num_tracks, num_cells, NUM_STATES), np.float32)
    length = blocks[:, SECONDS:].sum(axis=1)
    blocks, length = blocks[length > 0], length[length > 0]
    first = np.floor((blocks[:, START] - start) / width).astype(int)
    last = np.floor((blocks[:, START] + length - start) / width).astype(int)
    first, last = np.clip(first, 0, num_cells), np.clip(last, -1, num_cells - 1)
    times = np.maximum(0, last - first + 1)  # a block that reaches over several cells is in each of them
    row = np.repeat(np.arange(len(blocks)), times)
    cell = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times) + first[row]
    begin, end = start + cell * width, start + (cell + 1) * width
    overlap = np.minimum(blocks[row, START] + length[row], end) - np.maximum(blocks[row, START], begin)
    share = np.clip(overlap / length[row], 0.0, 1.0)[:, None]
    np.add.at(spent, (blocks[row, TRACK].astype(int), cell), blocks[row, SECONDS:] * share)
    return spent


def _stops(blocks: Array) -> Array:
    stops: Array = blocks[:, START] + blocks[:, SECONDS:].sum(axis=1)
    return stops
