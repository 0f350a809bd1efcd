"""The format of `timeline.jsonl`, and how to read it.

The file says what every worker, the learner and its stages did at each moment, and how busy the machine was. Its first
line names the tracks and states. Each further line holds the blocks of half a second. A block is
`[track, start, state, seconds, state, seconds, …]`: its start in seconds since the beginning of the run, and the
seconds spent in each state. `timeline_recorder` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from freerun.core import Array, Metrics, State, UserError
from freerun.transport.state_tracks import NUM_STATES, TrackBlock

FILE_NAME = "timeline.jsonl"
STATE_NAMES = tuple(state.name.lower().replace("_", "-") for state in State)
MOST_TRACKS, MOST_SECONDS, MOST_LINE_BYTES = 20_000, 1e10, 64 << 20
"""No run writes more. A file from elsewhere that claims more would only take all memory."""
TRACK, START, SECONDS = 0, 1, 2
"""Columns of an array of blocks; the seconds in each state are in the columns from SECONDS on."""


class TimelineHeader(NamedTuple):
    """The first line of the file."""

    tracks: list[str]
    began: float
    """When the run began, in seconds since 1970."""


class TimelineRecord(NamedTuple):
    """One further line: figures at one moment, and the blocks that had ended by then."""

    at: float
    figures: Metrics
    blocks: Array
    """[N, 2 + states]: track, start, and the seconds in each state."""


def pack_block(block: TrackBlock) -> list[float]:
    """Return a block as it stands in the file, without the states in which it spent no time."""
    # Five digits are 10 microseconds: below that a span is noise, and every digit costs space in the file.
    spent = [(state, round(seconds, 5)) for state, seconds in enumerate(block.seconds) if seconds >= 5e-6]
    return [block.track, round(block.start, 5), *(part for pair in spent for part in pair)]


def read_timeline_header(line: str | bytes) -> TimelineHeader:
    """Read the first line. Raises ValueError if freerun did not write it: a folder may come from anywhere."""
    try:
        content = json.loads(line)
        tracks, began = content["tracks"], float(content["began"])
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(tracks, list) or len(tracks) > MOST_TRACKS or not all(isinstance(name, str) for name in tracks):
        raise ValueError("the header has no valid tracks")
    return TimelineHeader(tracks, began)


def read_timeline_record(line: str | bytes, num_tracks: int) -> TimelineRecord:
    """Read a further line. Raises ValueError if freerun did not write it."""
    try:
        content = json.loads(line)
        at, packed = float(content.pop("at")), content.pop("blocks")
        blocks = np.zeros((len(packed), START + 1 + NUM_STATES), np.float64)
        for row, (track, start, *spent) in enumerate(packed):
            blocks[row, TRACK], blocks[row, START] = track, start
            for place in range(0, len(spent), 2):
                # The range raises IndexError for a state that does not exist, where an array would go beyond its row.
                blocks[row, SECONDS + range(NUM_STATES)[spent[place]]] = spent[place + 1]
        figures = {name: float(value) for name, value in content.items() if isinstance(value, int | float)}
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    tracks, sizes = blocks[:, TRACK], np.abs(np.append(blocks, at))
    if not (sizes < MOST_SECONDS).all() or not ((tracks >= 0) & (tracks < num_tracks)).all():
        raise ValueError("the line has numbers that no run writes")
    return TimelineRecord(at, figures, blocks)


class RecordedTimeline:
    """A timeline on disk. It may be hours long, so it is read line by line and never held as a whole."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            try:
                self.tracks, self.began = read_timeline_header(file.readline(MOST_LINE_BYTES))
            except ValueError:
                raise UserError(f"{path} does not begin with a line that freerun wrote") from None

    @classmethod
    def of(cls, run_dir: Path) -> RecordedTimeline | None:
        """Return the timeline of a run; None if nothing was recorded."""
        path = run_dir / FILE_NAME
        return cls(path) if path.is_file() and path.stat().st_size else None

    def records(self) -> Iterator[TimelineRecord]:
        """Yield all lines after the first."""
        with self.path.open("rb") as file:
            file.readline(MOST_LINE_BYTES)
            # The last line may still be in the middle of being written: only whole lines are read.
            while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                try:
                    yield read_timeline_record(line, len(self.tracks))
                except ValueError:
                    raise UserError(f"{self.path} has a line that freerun did not write") from None

    def grid(self, cell_seconds: float = 0.0625) -> TimelineGrid:
        """Sum up the whole timeline in cells of time."""
        grid = TimelineGrid(len(self.tracks), cell_seconds=cell_seconds)
        for record in self.records():
            grid.add(record)
        return grid


class TimelineGrid:
    """Seconds in each state, by track and by cell of time.

    The number of cells is fixed. When the timeline outgrows them, neighbours are added up and cells become twice as
    wide: so memory stays the same however long the run is.
    """

    def __init__(self, num_tracks: int, num_cells: int = 2048, cell_seconds: float = 0.0625):
        self.seconds = 0.0
        """How far the timeline reaches."""
        self._cell_seconds = cell_seconds
        self._spent = np.zeros((num_tracks, num_cells, NUM_STATES), np.float32)

    def add(self, record: TimelineRecord) -> None:
        """Add the blocks of one line."""
        num_tracks, num_cells, _ = self._spent.shape
        self.seconds = max(self.seconds, record.at)
        while self.seconds >= self._cell_seconds * num_cells:
            pairs = self._spent.reshape(num_tracks, num_cells // 2, 2, NUM_STATES).sum(axis=2)
            self._spent[:, : num_cells // 2], self._spent[:, num_cells // 2 :] = pairs, 0.0
            self._cell_seconds *= 2
        if len(record.blocks):
            stops = record.blocks[:, START] + record.blocks[:, SECONDS:].sum(axis=1)
            first = int(record.blocks[:, START].min() / self._cell_seconds)
            last = int(stops.max() / self._cell_seconds)
            # Only the cells that the blocks touch are computed, not the whole grid for each line.
            here = slice(max(0, first), min(num_cells, last + 1))
            self._spent[:, here] += spread_blocks(
                record.blocks, num_tracks, here.start * self._cell_seconds, self._cell_seconds, here.stop - here.start
            )

    def cells(self, start: float, stop: float, num_cells: int) -> Array:
        """Divide the time between two moments into equal cells: seconds as [track, cell, state]."""
        # Sum up to each edge, then take differences: S(edge) = sum of the whole cells before it + a share of its own.
        edges = np.linspace(start, stop, num_cells + 1) / self._cell_seconds
        sums = np.zeros((self._spent.shape[0], self._spent.shape[1] + 1, NUM_STATES))
        np.cumsum(self._spent, axis=1, out=sums[:, 1:])
        whole = np.clip(edges.astype(int), 0, self._spent.shape[1] - 1)
        # The newest cell is filled only up to the present, so a share of it is a share of that part.
        reached = self.seconds / self._cell_seconds
        filled = np.where(whole == int(reached), max(reached - int(reached), 1e-9), 1.0)
        share = np.clip((edges - whole) / filled, 0.0, 1.0)[:, None]
        until = sums[:, whole] + share * self._spent[:, whole]
        cells: Array = np.diff(until, axis=1).astype(np.float32)
        return cells


def spread_blocks(blocks: Array, num_tracks: int, start: float, cell_seconds: float, num_cells: int) -> Array:
    """Distribute blocks over cells of equal width from `start` on: seconds as [track, cell, state].

    The order of states within a block is unknown, so each of its states is spread evenly over the whole block.
    """
    spent = np.zeros((num_tracks, num_cells, NUM_STATES), np.float32)
    length = blocks[:, SECONDS:].sum(axis=1)
    blocks, length = blocks[length > 0], length[length > 0]
    first = np.floor((blocks[:, START] - start) / cell_seconds).astype(int)
    last = np.floor((blocks[:, START] + length - start) / cell_seconds).astype(int)
    first, last = np.clip(first, 0, num_cells), np.clip(last, -1, num_cells - 1)
    # One entry for each pair of a block and a cell that it touches: `row` is the block, `cell` the cell.
    num_touched = np.maximum(0, last - first + 1)
    row = np.repeat(np.arange(len(blocks)), num_touched)
    cell = np.arange(len(row)) - np.repeat(np.cumsum(num_touched) - num_touched, num_touched) + first[row]
    begin, end = start + cell * cell_seconds, start + (cell + 1) * cell_seconds
    overlap = np.minimum(blocks[row, START] + length[row], end) - np.maximum(blocks[row, START], begin)
    share = np.clip(overlap / length[row], 0.0, 1.0)[:, None]
    np.add.at(spent, (blocks[row, TRACK].astype(int), cell), blocks[row, SECONDS:] * share)
    return spent
