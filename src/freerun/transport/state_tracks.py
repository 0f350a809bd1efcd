"""What each worker, the learner and its stages do at each moment: one row of shared memory for each of them.

A change of state costs its writer under a microsecond and sends no message. Spans shorter than `RESOLUTION_SECONDS` are
added up into one block, so that a row holds seconds of history however often its writer changes its state. No time is
lost by that; only the order of the spans within a block is.

There is no lock: each row has one writer, and the learner's process reads. Nothing here relies on the order in which
the writer's stores become visible to the reader: x86 keeps it, ARM does not, and Python has no memory fence. Instead,
numbers that belong together carry a check value. Where it does not fit, the reader tries again the next time.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

from freerun.core import State

RESOLUTION_SECONDS = 0.01
NUM_STATES = len(State)
BLOCK_SIZE = 1 + NUM_STATES
"""A block is its start and the seconds in each state, as float64."""

# The layout of a row, in float64:
#   COUNT            number of blocks that were written to the ring so far
#   STATE, SINCE     the current state, and when it began
#   CHECK            the check value of STATE and SINCE
#   BLOCK            the block that is being added up
#   TOTALS           seconds in each state since the beginning, without the current span
#   RING             the last RING_BLOCKS complete blocks, each followed by its checksum
COUNT, STATE, SINCE, CHECK, BLOCK = 0, 1, 2, 3, 4
TOTALS = BLOCK + BLOCK_SIZE
RING = TOTALS + NUM_STATES
RING_ENTRY = BLOCK_SIZE + 1
RING_BLOCKS = 512
"""Five seconds of the shortest blocks. The reader comes twice a second."""
ROW = RING + RING_BLOCKS * RING_ENTRY
UNKNOWN = -1.0
LONG_SPAN_SECONDS = 1.0
"""A span that has not ended yet is reported in pieces once it is this long."""


class TrackBlock(NamedTuple):
    """Seconds that one track spent in each state. Their order is unknown: only a block of one state is a span."""

    track: int
    start: float
    seconds: tuple[float, ...]

    @property
    def stop(self) -> float:
        return self.start + sum(self.seconds)


class SharedTracks:
    """The rows. Any process may write a row, but only one at a time; only the learner's process reads them."""

    def __init__(self, context: ForkServerContext, names: Sequence[str]):
        self.names = list(names)
        self._array = context.RawArray("d", len(names) * ROW)
        self._map()
        for track in range(len(names)):
            self._memory[track * ROW + STATE] = UNKNOWN

    @property
    def workers(self) -> list[str]:
        """The names of the workers' tracks, which come before the learner's."""
        return self.names[: self.names.index("learner")]

    def _map(self) -> None:
        # A memoryview and not a numpy array, because it reads and writes single numbers faster.
        self._memory = memoryview(self._array).cast("B").cast("d")
        self._zeros = memoryview(bytes(8 * NUM_STATES)).cast("d")

    def __getstate__(self) -> dict[str, object]:
        return {"names": self.names, "_array": self._array}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    # ------------------------------------------------------------------------------------------ for the writer

    def set_state(self, track: int, state: State, at: float | None = None) -> None:
        """End the last state and begin this one: now, or at the moment that another machine has reported."""
        memory, row = self._memory, track * ROW
        now = time.perf_counter() if at is None else max(at, memory[row + SINCE])
        last = int(memory[row + STATE])
        if last == UNKNOWN:
            memory[row + BLOCK] = now
        else:
            seconds = now - memory[row + SINCE]
            # A span that is long enough becomes a block of its own, so that its start and end stay exact. The block
            # before it is closed first, unless that holds next to nothing (a tenth of the resolution).
            if seconds >= RESOLUTION_SECONDS and memory[row + SINCE] - memory[row + BLOCK] > RESOLUTION_SECONDS / 10:
                self._push_block(row, memory[row + SINCE])
            memory[row + BLOCK + 1 + last] += seconds
            memory[row + TOTALS + last] += seconds
            if now - memory[row + BLOCK] >= RESOLUTION_SECONDS:
                self._push_block(row, now)
        # A reader that comes between these stores, or sees them in another order, finds that the check does not fit.
        memory[row + STATE] = state
        memory[row + SINCE] = now
        memory[row + CHECK] = _check_value(state, now)

    def _push_block(self, row: int, now: float) -> None:
        """Copy the complete block into the ring, raise the count, and begin the next block."""
        memory, block, number = self._memory, row + BLOCK, int(self._memory[row + COUNT])
        entry = row + RING + number % RING_BLOCKS * RING_ENTRY
        complete = memory[block : block + BLOCK_SIZE]
        memory[entry : entry + BLOCK_SIZE] = complete
        # The checksum starts from the block's number, so that the entry of a round before does not fit either.
        memory[entry + BLOCK_SIZE] = zlib.crc32(complete, number)
        memory[row + COUNT] += 1  # last: on x86 a reader that sees the count also sees the block
        memory[block] = now
        memory[block + 1 : block + BLOCK_SIZE] = self._zeros

    # ------------------------------------------------------------------------------------------ for the reader

    def totals(self, track: int) -> list[float]:
        """Seconds in each state so far, including the current span. All are 0 for a track that nobody has written.

        If the writer changes its state at this very moment, one span may be missing or be counted twice. The next call
        is right again, because only the writer ever changes the totals themselves.
        """
        row, current = track * ROW, self.current(track)
        totals = list(self._memory[row + TOTALS : row + TOTALS + NUM_STATES])
        if current is not None:
            state, since = current
            totals[state] += max(0.0, time.perf_counter() - since)
        return totals

    def num_blocks(self, track: int) -> int:
        """The number of blocks that were completed so far."""
        return int(self._memory[track * ROW + COUNT])

    def blocks(self, track: int, first: int) -> tuple[list[TrackBlock], int]:
        """The complete blocks from number `first` on, and the number to ask for next time.

        Blocks that were overwritten meanwhile are left out. A block that is not whole yet, although the count already
        includes it (ARM may show the stores in that order), is left for the next time.
        """
        count, found = self.num_blocks(track), []
        # The oldest entry of the ring may be overwritten while it is read, hence + 1.
        number = max(first, count - RING_BLOCKS + 1)
        while number < count:
            entry = track * ROW + RING + number % RING_BLOCKS * RING_ENTRY
            # One copy first: the checksum must cover exactly the numbers that are used.
            copied = memoryview(bytes(self._memory[entry : entry + RING_ENTRY])).cast("d")
            start, *seconds, checksum = copied
            if checksum != zlib.crc32(copied[:BLOCK_SIZE], number):
                break
            found.append(TrackBlock(track, start, tuple(seconds)))
            number += 1
        return found, number

    def current(self, track: int) -> tuple[State, float] | None:
        """The current state and when it began; None if nobody has written it, or it is being written right now."""
        state, since, check = self._memory[track * ROW + STATE : track * ROW + CHECK + 1]
        return None if state == UNKNOWN or check != _check_value(state, since) else (State(int(state)), since)


def _check_value(state: float, since: float) -> float:
    """A number that fits only this pair: the moment times 16 leaves space for the number of the state, below 16.

    It is cheaper than a checksum, and a change of state must cost its writer next to nothing.
    """
    return since * 16 + state


class TracksReader:
    """Reads what has happened on all tracks since it was made, and reports each second once."""

    def __init__(self, tracks: SharedTracks):
        self._tracks = tracks
        self._next_block = [tracks.num_blocks(track) for track in range(len(tracks.names))]
        self._reported_until = [time.perf_counter()] * len(tracks.names)

    def read(self, to_the_end: bool = False) -> list[TrackBlock]:
        """All new blocks. Spans that have not ended are reported up to now if they are long, or if `to_the_end`."""
        found: list[TrackBlock] = []
        now = time.perf_counter()
        for track in range(len(self._tracks.names)):
            blocks, self._next_block[track] = self._tracks.blocks(track, self._next_block[track])
            for block in blocks:
                found += self._unreported(block)
            current = self._tracks.current(track)
            if current is not None and now - max(current[1], self._reported_until[track]) > (
                0 if to_the_end else LONG_SPAN_SECONDS
            ):
                state, since = current
                seconds = [0.0] * NUM_STATES
                seconds[state] = now - since
                found += self._unreported(TrackBlock(track, since, tuple(seconds)))
        return found

    def _unreported(self, block: TrackBlock) -> list[TrackBlock]:
        """The block without the time that was reported before it was complete; an empty list if nothing is left."""
        reported_until = self._reported_until[block.track]
        excess = reported_until - block.start
        if excess <= 0:
            self._reported_until[block.track] = block.stop
            return [block]
        if block.stop <= reported_until:
            return []
        # What was reported early was a span that had not ended, which is the longest one of the block.
        longest = max(range(NUM_STATES), key=lambda state: block.seconds[state])
        seconds = list(block.seconds)
        seconds[longest] = max(0.0, seconds[longest] - excess)
        self._reported_until[block.track] = block.stop
        return [TrackBlock(block.track, reported_until, tuple(seconds))]
